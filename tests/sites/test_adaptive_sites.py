"""Adam for y between sites: moments travel or stay as in the simulator, bit for bit."""

import pytest

from support.sites.loopback import Loopback, differences, simulated

pytestmark = pytest.mark.usefixtures("short_waits")


@pytest.mark.parametrize("way", ["adam", "server_adam"])
@pytest.mark.parametrize("lower", ["global", "local"])
@pytest.mark.parametrize("name", ["penalty", "fedbio"])
def test_sites_take_the_steps_of_the_simulator(tmp_path, name, lower, way):
    federation = Loopback(tmp_path)
    algorithm = {"name": name, "num_local_steps": 2, "lower_optimiser": way}
    plan = federation.plan(algorithm, {"name": "quadratic", "num_clients": 3, "lower": lower}, num_iterations=2)
    assert federation.serve(plan) == "finished"
    _, wanted = simulated(plan, tmp_path / "simulated")
    found, _ = federation.record.load()
    assert any("s_y" in part for part in found) is (lower == "global")  # a site keeps its own
    assert {part: far for part, far in differences(found, wanted).items() if far} == {}
