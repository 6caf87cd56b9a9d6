"""A site's policy: its defaults are for real data, and every refusal names the line that caused it."""

import resource
import subprocess
import sys

import pytest

from fedbilevel.errors import PlanError, PolicyError
from fedbilevel.sites.plan import plan_of
from fedbilevel.sites.policy import Policy, read_settings


def plan(**changes):
    whole = {
        "name": "trial",
        "sites": ["a", "b"],
        "num_iterations": 5,
        "task": {"name": "data_cleaning"},
        "algorithm": {"name": "fbo_aggitd"},
        "options": {"batch_size": 64},
        "num_classes": 10,
        **changes,
    }
    return plan_of(whole)


def settings(tmp_path, text):
    (tmp_path / "site.toml").write_text(text)
    return read_settings(tmp_path)


def test_the_defaults_let_the_built_in_tasks_run():
    Policy().check_plan(plan())
    Policy().check_plan(plan(options={}))  # all samples of a client
    Policy().check_samples({"train": 100, "val": 20})


@pytest.mark.parametrize(
    ("policy", "changes", "says"),
    [
        (Policy(tasks=["imbalance"]), {}, r"does not allow data_cleaning: its line 'tasks' allows imbalance"),
        (Policy(algorithms=[]), {}, r"does not allow fbo_aggitd: its line 'algorithms' allows none"),
        (
            Policy(),
            {"options": {"batch_size": 15}},
            r"batches of 15 samples: its line 'min_batch' asks for at least 16",
        ),
        (Policy(), {"options": {"batch_size": {"train": 64, "val": 1}}}, r"batches of 1 samples: its line 'min_batch'"),
        (
            Policy(),
            {"options": {"batch_size": {"train": 64, "outside": 2}}},
            r"batches of 2 samples: its line 'min_batch'",
        ),
        (
            Policy(),
            {"algorithm": {"name": "fbo_aggitd", "num_local_steps": [1, 1001]}},
            r"num_local_steps = 1001: its line 'num_local_steps' in",
        ),
        (
            Policy(settings={"num_local_*": (1, 5)}),
            {"algorithm": {"name": "fbo_aggitd", "num_local_steps": 6}},
            r"allows 1 to 5",
        ),
        (
            Policy(settings={"lr_upper": (0, 0.5)}),
            {"algorithm": {"name": "fbo_aggitd", "lr_upper": 0.75}},
            r"lr_upper = 0.75: .* allows 0 to 0.5",
        ),
    ],
)
def test_a_plan_outside_the_policy_is_refused_by_the_line(policy, changes, says):
    with pytest.raises(PolicyError, match=says):
        policy.check_plan(plan(**changes))


def test_an_own_line_goes_before_a_default_and_a_name_before_a_pattern():
    policy = Policy(settings={"num_*": (0, 7), "num_hidden": (0, 50)})
    assert [policy.range_of(name) for name in ("num_terms", "num_hidden", "dim_upper")] == [(0, 7), (0, 50), (1, 1000)]
    assert Policy().range_of("num_classes") == (2, 1000)
    assert Policy().range_of("lr_upper") == (-float("inf"), float("inf"))


def test_limits_of_samples_answers_time_and_disk(tmp_path):
    policy = Policy(
        min_samples=50,
        max_answer_megabytes=1.0,
        max_answer_seconds=2.0,
        max_disk_megabytes=0.001,
        max_runs=1,
        max_rounds=3,
    )
    with pytest.raises(PolicyError, match="the 50 training samples that the line 'min_samples'"):
        policy.check_samples({"train": 49, "val": 100})
    with pytest.raises(PolicyError, match="fewer test samples than the 16 that the line 'min_batch'"):
        policy.check_samples({"train": 50, "val": 100, "test": 15})
    policy.check_answer(1_000_000)
    with pytest.raises(PolicyError, match=r"an answer of 1\.1 MB: its line 'max_answer_megabytes' allows 1"):
        policy.check_answer(1_100_000)
    policy.check_seconds(2.0)
    with pytest.raises(PolicyError, match="after 3 s: the line 'max_answer_seconds'"):
        policy.check_seconds(2.6)
    policy.check_rounds(3)
    with pytest.raises(PolicyError, match="allows 3 answers in total over all runs"):
        policy.check_rounds(4)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    policy.check_runs(tmp_path / "runs", "one")
    with pytest.raises(PolicyError, match="the state of 1 runs: the line 'max_runs' of its policy allows 1"):
        policy.check_runs(tmp_path / "runs", "two")
    (tmp_path / "runs" / "one" / "version-1").write_bytes(bytes(900))
    policy.check_disk(tmp_path, 100)
    with pytest.raises(PolicyError, match="the line 'max_disk_megabytes'"):
        policy.check_disk(tmp_path, 101)


@pytest.mark.parametrize("text", ["[1]", "[2, 1]", '["a", 2]', "3", "[1, true]"])
def test_a_value_that_is_not_a_range_is_refused(tmp_path, text):
    with pytest.raises(
        PlanError, match=r"num_terms in \[policy.settings\] of site.toml is .*, expected a range such as \[1, 100\]"
    ):
        settings(tmp_path, f"[policy.settings]\nnum_terms = {text}\n")


def test_settings_of_a_file(tmp_path):
    found = settings(tmp_path, 'auto_approve = true\n[policy]\nmin_batch = 3\n[policy.settings]\n"num_*" = [1, 9]\n')
    assert (found.auto_approve, found.policy.min_batch, found.policy.range_of("num_terms")) == (True, 3, (1, 9))
    assert settings(tmp_path, "").auto_approve is False


def test_the_memory_of_a_process_is_limited():
    """In a process of its own: the limit stays."""
    code = (
        "from fedbilevel.sites.policy import Policy; import torch; from fedbilevel.sites.site import _is_memory\n"
        "Policy(max_memory_megabytes=900).limit_memory(); torch.ones(10**7)\n"
        "try:\n    torch.ones(10**9)\nexcept Exception as error:\n    print(_is_memory(error))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True\n"
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
