"""Outcomes read from what pytest prints while several workers run the tests."""

from __future__ import annotations

from envs.images.outcomes import normal_expected, read_printed

XDIST = b"""\
created: 2/2 workers
2 workers [3 items]

[gw1] [ 33%] PASSED t.py::test_a[x y]
t.py::test_b[1]
[gw0] [ 66%] FAILED t.py::test_b[1]
[gw1] [100%] PASSED t.py::test_c
=================================== FAILURES ===================================
[gw0] linux -- Python 3.12.3 /usr/bin/python3
PASSED t.py::test_b[1]
=========================== short test summary info ============================
PASSED t.py::test_a[x y]
PASSED t.py::test_c
FAILED t.py::test_b[1] - assert 1 == 2
========================= 1 failed, 2 passed in 0.31s ==========================
"""


def test_workers_and_their_progress_are_no_part_of_a_name() -> None:
    outcome = read_printed(XDIST, 1)
    assert outcome.complete
    assert outcome.statuses == {
        "t.py::test_a[x y]": "PASSED",
        "t.py::test_b[1]": "FAILED",
        "t.py::test_c": "PASSED",
    }
    cut = read_printed(XDIST.partition(b"=")[0], 1)  # killed before the summary
    assert not cut.complete
    assert cut.statuses == {}


def test_a_blank_at_the_end_of_a_name_stays_on_both_sides() -> None:
    name = "t.py::test_a[x] "
    log = f"=== short test summary info ===\nPASSED {name}\nFAILED {name.rstrip()} - x\n"
    assert read_printed(log.encode(), 1).statuses == {name: "PASSED", name.rstrip(): "FAILED"}
    assert normal_expected({name: "PASSED"}) == {name: "PASSED"}
