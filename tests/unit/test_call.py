"""What comes in and what goes out of a turn."""

from __future__ import annotations

import subprocess
import sys

from proxy.call import Report, unique_id


def test_no_two_turns_have_the_same_id_nor_two_of_their_legs() -> None:
    reports = [Report() for _ in range(1000)]
    ids = [report.unique for report in reports]
    ids += [report.next_leg() for report in reports for _ in range(3)]
    assert len(set(ids)) == 4000


def test_another_process_makes_other_ids() -> None:
    code = "from proxy.call import unique_id; print(unique_id())"
    ids = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(2)]
    assert len({unique_id(), *ids}) == 3
    assert all(len(bytes.fromhex(id_)) == 16 for id_ in (unique_id(), *ids))
