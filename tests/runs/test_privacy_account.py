"""The account of privacy on the disk: written before a release, and never rolled back."""

import json

import pytest

pytest.importorskip("opacus", reason="opacus is not installed: pip install 'fedbilevel[privacy]'")

from fedbilevel.errors import BudgetError, CheckpointError
from fedbilevel.privacy import Budget, Release
from fedbilevel.runs.privacy_account import FILE, account_in

BUDGET = Budget(10.0, 1e-5)


def test_a_new_process_continues_the_account_whatever_its_checkpoint_says(tmp_path):
    first = account_in(tmp_path, BUDGET)
    first.spend([Release(2.0)] * 2)
    checkpoint = first.state_dict()
    while first.rounds_left([Release(2.0)]):
        first.spend([Release(2.0)])
    again = account_in(tmp_path, BUDGET)
    again.merge(checkpoint)
    assert again.epsilon() == first.epsilon() > 8
    with pytest.raises(BudgetError, match="above the budget of 10"):
        again.spend([Release(2.0)])
    other = account_in(tmp_path, BUDGET, run="other")  # the same data
    with pytest.raises(BudgetError, match="above the budget of 10"):
        other.spend([Release(2.0)])


def test_the_account_is_on_the_disk_before_the_release(tmp_path):
    accountant = account_in(tmp_path, BUDGET)
    accountant.spend([Release(2.0, 0.5, 3)])
    assert json.loads((tmp_path / FILE).read_text()) == {"run": [[2.0, 0.5, 3]]}
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()  # cannot be replaced by a file
    with pytest.raises(CheckpointError, match="cannot be written"):
        accountant.spend([Release(2.0, 0.5, 3)])
    assert accountant.state_dict() == {"run": [[2.0, 0.5, 3]]}


@pytest.mark.parametrize("content", ["", "[]", '{"run": [[2.0, 1.0, -5]]}'])
def test_a_damaged_account_stops_the_run(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(CheckpointError, match="holds the account of privacy and cannot be read"):
        account_in(tmp_path, BUDGET)
