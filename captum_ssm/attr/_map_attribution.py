"""What the methods of maps share: from the arguments of a call to maps, and to relevance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from captum_ssm.attr._base import TokenAttribution
from captum_ssm.attr._maps import MapChoices, MapOptions, StageMaps, rollout_matrix


class MapAttribution(TokenAttribution):
    """A method that reads the query's row off one map per layer."""

    @classmethod
    def reads_whole_maps(cls, **options: Any) -> bool:
        """Whether the options rescale whole maps."""
        return bool(options.get("discard_ratio") or options.get("min_max"))

    def _maps(
        self,
        inputs: Any,
        target: Any,
        additional_forward_args: Any,
        position: Any,
        choices: MapChoices,
        *,
        layers: Any = None,
        start_layer: int = 0,
        grid: int | None = None,
        gradients: bool = False,
        query: bool = True,
        **unified: Any,
    ) -> StageMaps:
        # Ali et al., eq. 24, keeps the positive part of gradient times attention.
        paper = MapChoices(sign="clamp") if gradients else MapChoices()
        options = MapOptions.of(paper | choices, **unified)
        request = self._request(inputs, additional_forward_args)
        frozen = self._run(request, position, target=target, query=query, gradients=gradients)
        if grid is not None:
            frozen = frozen.from_grid(grid, self.interpolate_mode or "bilinear")
        chosen = frozen.from_layer(start_layer) if layers is None else frozen.select(layers)
        return StageMaps(frozen, chosen, options, gradients=gradients)

    def _relevance(self, maps: StageMaps, read: Callable[[StageMaps], list[Tensor]]) -> Any:
        with self._computing():
            return self._formatted(read(maps), maps.frozen)

    def _rollout(self, maps: StageMaps) -> Tensor:
        with self._computing():
            return maps.frozen.mask_matrix(rollout_matrix(maps))
