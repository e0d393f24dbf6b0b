"""Scripts that once told production and model apart; each one is run by every test run.

To add one: take the lines that a failing run prints under "for tests/model/regressions.py" and put
them into the list. The first line of the entry may say what was wrong.
"""

from tests.model.driver import Config, Script

REGRESSIONS: list[tuple[Config, Script]] = [
    # plan_backup stopped at the first backed ancestor, though write_back allows gaps above it.
    (
        Config(page_size=1, eviction_policy="lfu", write_policy="write_back", device_pages=32, host_pages=48),
        [
            ("insert", 0, (0,)),
            ("insert", 0, (1, 1)),
            ("insert_host", 226234854625352, (0,)),
            ("lock", 6, ()),
            ("evict", 0, ()),
            ("insert", 84914170820569, (2,)),
            ("insert", 1960388650, (1,)),
            ("backup", 95746685, ()),
        ],
    ),
]
