"""The page on schedules has them all. That its blocks run is tested with all other pages."""

from pathlib import Path

from pippy.drivers.plan.orders.registry import REGISTRY

PAGE = Path(__file__).parents[3] / "docs" / "schedules.md"


def test_every_schedule_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in REGISTRY if f"| `{name}` |" not in page] == []
