"""What a replay found, as numbers, as JSON and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unified_cache.replay.run import Settings

__all__ = ["ReplayReport"]


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """Counts of one replay. Pages are those of the tree: a block, or `page_size` tokens."""

    settings: Settings
    block_size: int
    requests: int
    """Requests of the traces."""
    bypassed: int
    """Those that were larger than the device tier: none of their blocks was looked up or kept."""
    blocks: int
    """Blocks that the requests asked for."""
    tokens: int
    """Tokens that the requests asked for."""
    device_hit_blocks: int
    """Blocks found on device."""
    host_hit_blocks: int
    """Blocks found on host and loaded back."""
    device_hit_tokens: int
    host_hit_tokens: int
    device_evicted: int
    """Device pages freed by eviction."""
    demoted: int
    """Those of them whose content stayed on host."""
    host_evicted: int
    """Host pages freed by eviction."""
    copied_to_host: int
    """Pages copied from device to host."""
    copied_to_device: int
    """Pages copied from host to device."""
    dropped: int
    """Pages whose last copy went when the device was evicted."""
    backups_given_up: int
    """Copies to host that were not made, because the host had no room."""
    seconds: float
    """Time in the tree and the pools."""
    bad_lines: int = 0
    """Lines that were left out."""
    backward: int = 0
    """Requests that came earlier than the one before them."""

    @property
    def pages_per_block(self) -> float:
        page_size = self.settings.page_size
        return 1.0 if page_size is None else self.block_size / page_size

    @property
    def device_hit_rate(self) -> float:
        return self.device_hit_blocks / self.blocks

    @property
    def host_hit_rate(self) -> float:
        return self.host_hit_blocks / self.blocks

    @property
    def hit_rate(self) -> float:
        return (self.device_hit_blocks + self.host_hit_blocks) / self.blocks

    @property
    def token_hit_rate(self) -> float:
        return (self.device_hit_tokens + self.host_hit_tokens) / self.tokens

    @property
    def writes_per_block(self) -> float:
        """Blocks copied from device to host for each block that was asked for."""
        return self.copied_to_host / self.pages_per_block / self.blocks

    def to_json(self) -> dict[str, Any]:
        """Everything as one flat object of numbers, and the settings."""
        numbers = {name: value for name, value in asdict(self).items() if name != "settings"}
        rates = {
            name: round(getattr(self, name), 6)
            for name in ("device_hit_rate", "host_hit_rate", "hit_rate", "token_hit_rate", "writes_per_block")
        }
        return numbers | rates | {"seconds": round(self.seconds, 6), "settings": asdict(self.settings)}

    def to_text(self) -> str:
        """A table for people."""
        s = self.settings
        host = f"host {s.host_blocks:,} blocks, {s.write_policy}" if s.host_blocks else "no host tier"
        unit = "block by block" if s.page_size is None else f"token by token, pages of {s.page_size}"
        lines = [
            f"{self.requests:,} requests, {self.blocks:,} blocks of {self.block_size} tokens, "
            f"{self.tokens:,} tokens; {unit}",
            f"device {s.device_blocks:,} blocks, {s.eviction_policy}; {host}",
            "",
            f"{'':22}{'blocks':>12}{'rate':>10}{'tokens':>14}{'rate':>10}",
        ]
        for name, blocks, tokens in (
            ("hit on device", self.device_hit_blocks, self.device_hit_tokens),
            ("hit on host", self.host_hit_blocks, self.host_hit_tokens),
            (
                "hit",
                self.device_hit_blocks + self.host_hit_blocks,
                self.device_hit_tokens + self.host_hit_tokens,
            ),
        ):
            rates = f"{100 * blocks / self.blocks:8.2f} %{tokens:>14,}{100 * tokens / self.tokens:8.2f} %"
            lines.append(f"{name:22}{blocks:>12,}{rates}")
        lines.append("")
        for name, pages in (
            ("evicted from device", self.device_evicted),
            ("  kept on host", self.demoted),
            ("  lost", self.dropped),
            ("evicted from host", self.host_evicted),
            ("copied to host", self.copied_to_host),
            ("copied to device", self.copied_to_device),
        ):
            moved = pages / self.pages_per_block
            lines.append(f"{name:22}{moved:>12,.0f}{moved / self.blocks:10.4f} a block asked for")
        lines.append("")
        for count, what in (
            (self.bypassed, "requests were larger than the device tier and went past it"),
            (self.backups_given_up, "copies to host were given up: no room"),
            (self.bad_lines, "broken lines were left out"),
            (self.backward, "requests came earlier than the one before them"),
        ):
            if count:
                lines.append(f"{count:,} {what}")
        speed = self.requests / max(self.seconds, 1e-9)
        lines.append(f"{self.seconds:.3f} s in the cache, {speed:,.0f} requests a second")
        return "\n".join(lines)
