"""What the cache counts. Counters only go up; a reset of the cache leaves them alone."""

import dataclasses
from dataclasses import dataclass

__all__ = ["Counters"]


@dataclass(slots=True)
class Counters:
    """Plain numbers, changed on the scheduler's thread only.

    Every asked token is a hit of exactly one tier or was computed:
    ``asked = hit_device + hit_host + hit_storage + computed``, once the requests have begun to compute.
    """

    requests: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_retracted: int = 0  # times that one was taken off the device
    asked_tokens: int = 0  # of requests that began to compute, at that moment
    hit_tokens_device: int = 0
    hit_tokens_host: int = 0
    hit_tokens_storage: int = 0

    backup_copies: int = 0  # submissions, each with any number of pages
    backup_pages: int = 0
    backups_given_up: int = 0  # nodes that found no room on host
    load_copies: int = 0
    load_pages: int = 0
    load_backs_skipped: int = 0  # too short, over quota, or no room on device
    failed_copies: int = 0

    evicted_device_pages: int = 0  # demoted ones included
    evicted_host_pages: int = 0
    demoted_nodes: int = 0
    dropped_tokens: int = 0  # their last copy went

    prefetches: int = 0
    prefetches_refused: int = 0  # too many were under way
    storage_look_ups: int = 0  # questions, each for any number of requests
    storage_found_pages: int = 0
    storage_shared_pages: int = 0  # of these, pages that were being read for another request already
    storage_read_pages: int = 0
    storage_written_pages: int = 0
    storage_failed_pages: int = 0  # not stored; tried again at their next access
    storage_skipped_pages: int = 0  # not handed to storage, since too much was on its way
    storage_corrupt_pages: int = 0
    storage_warmed_pages: int = 0  # of those read, that nobody had asked for yet
    storage_unlogged_pages: int = 0  # that the log of prefixes could not take
    storage_damaged_records: int = 0  # places in the log of prefixes that could not be read
    storage_errors: int = 0

    def as_dict(self) -> dict[str, int]:
        """The counters by name."""
        return dataclasses.asdict(self)
