"""What the weights that SGLang serves are called, for what is stored."""

from __future__ import annotations

import logging
import uuid

__all__ = ["WeightNames"]

_log = logging.getLogger(__name__)


class WeightNames:
    """Names weights by SGLang's ``weight_version``, as long as that says which they are.

    SGLang changes weights without another version if nobody gives one. They get a name then that nobody else
    has, so that neither what was stored before is found for them, nor by others what is stored from now on.
    """

    def __init__(self) -> None:
        # The version under which weights were changed that have none of their own.
        self._changed: str | None = None
        self._own: tuple[str, str] | None = None  # a version, and what its weights are called instead

    def change(self, now: str | None, version: str | None) -> None:
        """Weights are about to be changed.

        Args:
            now: ``weight_version`` of those that are there.
            version: of the new ones; None: nobody has said.
        """
        self._changed = (now or "") if version is None else None
        if version is not None and self._own is not None and self._own[0] == version:
            self._own = None

    def name(self, now: str | None) -> str:
        """What the weights are called that are there now.

        Args:
            now: their ``weight_version``.
        """
        version, changed = now or "", self._changed
        self._changed = None
        if changed == version:
            self._own = (version, f"{version} changed {uuid.uuid4().hex}")
            _log.warning(
                "unified-cache: the weights were changed and are still called %r: what was stored before is "
                "not used any more, and what is stored from now on is found by this server alone; give new "
                "weights a weight_version of their own",
                version,
            )
        elif self._own is not None and self._own[0] != version:
            self._own = None
        return version if self._own is None else self._own[1]
