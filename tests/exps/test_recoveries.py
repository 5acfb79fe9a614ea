"""The experiment that disturbs runs, on a small scale."""

import warnings

import pytest

from exps.recoveries import campaign


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("fewer", [False, True])
def test_disturbed_runs_end_as_the_undisturbed_one(fewer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that two neighbours were lost
        findings = campaign(count=3, seed=3, kinds=("kill", "exception"), steps=8, share=3, fewer=fewer)
    assert sum(findings.happened.values()) == 3
    assert findings.recoveries
    assert findings.wrong == []
