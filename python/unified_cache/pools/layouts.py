"""How pages lie in host memory: the layouts that there are, each of them once.

To add one, add it to `_LAYOUTS`: settings, errors, planes and storage take what they need from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from unified_cache.errors import ArgumentError

if TYPE_CHECKING:
    from unified_cache._torch import torch
    from unified_cache.pools.planes import PageShape, PoolPlanes

__all__ = ["HOST_LAYOUTS", "HostLayout", "host_layout"]

_Dimension = Literal["layers", "parts", "pages", "tokens", "heads"]
# The order in which a pool's planes are taken out: by (layers, parts), each one (pages, tokens, heads).
_OF_PLANES: tuple[_Dimension, ...] = get_args(_Dimension)


@dataclass(frozen=True, slots=True)
class HostLayout:
    """An order of a host pool's dimensions.

    Attributes:
        name: the setting's value.
        order: dimensions, outermost first; the elements of a head always come last. A pool with one part (a
            latent buffer, MLA) has neither "parts" nor "heads" in its shape.
        about: what it is for, in a few words.
    """

    name: str
    order: tuple[_Dimension, ...]
    about: str

    @property
    def contiguous_pages(self) -> bool:
        """A page is one run of bytes: what storage and zero-copy transfers need."""
        return self.order[0] == "pages"

    def shape(self, pages: int, page: PageShape, elements: int) -> tuple[int, ...]:
        """The shape of the whole pool, row-major, as documented: of what MLA has not, there is no dimension.

        Args:
            pages: pages in the pool.
            page: what a page holds.
            elements: elements of a head.
        """
        absent = ("parts", "heads") if page.parts == 1 else ()
        sizes = self._sizes(pages, page)
        return (*(size for name, size in zip(self.order, sizes, strict=True) if name not in absent), elements)

    def planes(self, memory: torch.Tensor, pages: int, page: PageShape) -> PoolPlanes:
        """The planes of a pool in this layout.

        Args:
            memory: the whole pool, flat, of the elements' dtype.
            pages: pages in the pool.
            page: what a page holds.
        """
        from unified_cache.pools.planes import PoolPlanes  # needs torch; this module's names do not

        elements = page.run_bytes // memory.element_size()
        whole = memory.view(*self._sizes(pages, page), elements)
        ordered = whole.permute(*(self.order.index(name) for name in _OF_PLANES), len(self.order))
        tensors = [ordered[layer, part] for layer in range(page.layers) for part in range(page.parts)]
        return PoolPlanes(tensors, page.parts)

    def _sizes(self, pages: int, page: PageShape) -> list[int]:
        sizes = {
            "layers": page.layers,
            "parts": page.parts,
            "pages": pages,
            "tokens": page.tokens,
            "heads": page.heads,
        }
        return [sizes[name] for name in self.order]


_LAYOUTS = (
    HostLayout(
        "page_first",
        ("pages", "parts", "tokens", "layers", "heads"),
        "one page contiguous: one storage object",
    ),
    HostLayout(
        "page_first_direct",
        ("pages", "parts", "layers", "tokens", "heads"),
        "one page contiguous, and each layer of it too",
    ),
    HostLayout(
        "page_head",
        ("pages", "heads", "parts", "tokens", "layers"),
        "one page contiguous, heads outermost: ranks of different TP sizes share",
    ),
    HostLayout(
        "layer_first",
        ("parts", "layers", "pages", "tokens", "heads"),
        "like the device pool; not for storage",
    ),
)

HOST_LAYOUTS = tuple(layout.name for layout in _LAYOUTS)


def host_layout(name: str) -> HostLayout:
    """The layout of that name.

    Raises:
        ArgumentError: there is none.
    """
    for layout in _LAYOUTS:
        if layout.name == name:
            return layout
    listed = ", ".join(map(repr, HOST_LAYOUTS))
    raise ArgumentError(f"host_layout must be one of {listed}, not {name!r}")
