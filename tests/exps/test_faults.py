"""Two faults at random, as the experiment injects hundreds."""

import pytest

from exps import faults


def test_two_faults_at_random(monkeypatch, capfd):
    options = "--count 2 --seed 6 --deadly 0.33 --places local"
    monkeypatch.setattr("sys.argv", ["faults", *options.split()])
    with pytest.raises(SystemExit) as ended:
        faults.main()
    out, err = capfd.readouterr()
    assert not ended.value.code, out + err[-2000:]
    assert sum(int(row.split()[-3]) for row in out.splitlines()[1:]) == 2
