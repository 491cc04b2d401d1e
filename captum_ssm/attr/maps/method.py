"""What the methods of maps share: from the arguments of a call to maps, and to relevance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from captum_ssm.attr.base import TokenAttribution
from captum_ssm.attr.maps.maps import GridMaps, MapChoices, MapOptions, rollout_matrix, rollout_row
from captum_ssm.attr.options import Arguments
from captum_ssm.utils.allocator import workspace
from captum_ssm.utils.captum_api import TargetType


class MapAttribution(TokenAttribution):
    """A method that reads the query's row off one map per layer."""

    @classmethod
    def reads_whole_maps(cls, **options: Any) -> bool:
        """Whether the options rescale whole maps."""
        return bool(options.get("discard_ratio") or options.get("min_max"))

    @classmethod
    def is_additive(cls, **options: Any) -> bool:
        """Whether maps depend neither on the target nor on later tokens, and all are made."""
        is_fixed = not (cls.needs_target(**options) or cls.reads_whole_maps(**options))
        return is_fixed and not options.get("tolerance")

    def _map_options(self, **choices: Any) -> MapOptions:
        # How maps are made, for options of ``attribute``.
        return MapOptions.of(choices)

    def _maps(
        self,
        arguments: Arguments,
        options: dict[str, Any],
        *,
        layers: Any = None,
        start_layer: int = 0,
        grid: int | None = None,
        query: bool = True,
    ) -> GridMaps:
        made = self._map_options(**options)
        frozen = self._freeze(arguments, query=query, gradients=made.gradients)
        if grid is not None:
            frozen = frozen.from_grid(grid, self.interpolate_mode or "bilinear")
        chosen = frozen.from_layer(start_layer) if layers is None else frozen.select(layers)
        return GridMaps(frozen, chosen, made)

    def _relevance(self, maps: GridMaps, read: Callable[[GridMaps], list[Tensor]]) -> Any:
        with self._computing():
            return self._formatted(read(maps), maps.frozen)


class RolloutAttribution(MapAttribution):
    """A method that multiplies the maps of the layers."""

    def _attribute(
        self,
        arguments: Arguments,
        *,
        start_layer: int = 0,
        grid: int | None = None,
        **options: Unpack[MapChoices],
    ) -> Any:
        """Relevance of each input token."""
        maps = self._maps(arguments, {**options}, start_layer=start_layer, grid=grid)
        return self._relevance(maps, rollout_row)

    @workspace()
    def rollout(
        self,
        inputs: Any,
        target: TargetType = None,
        additional_forward_args: Any = None,
        *,
        position: Any = None,
        start_layer: int = 0,
        **options: Any,
    ) -> Tensor:
        r"""The whole product over layers :math:`\rho`, every token a query: ``(B, L, L)``.

        The arguments are those of :meth:`attribute`, except ``grid``; ``target`` and ``position``
        matter where gradients are taken. It takes memory quadratic in the sequence.

        Raises:
            ValueError: for ``aggregation="raw"``, which multiplies no layers.
            ValueError, TypeError: as for :meth:`attribute`.
            MemoryLimitError: where the matrices do not fit ``memory_limit``.

        Examples::

            >>> MambaRollout(model).rollout(input_ids).shape
            torch.Size([1, 7, 7])
        """
        if options.get("aggregation") == "raw":
            raise ValueError(
                "aggregation is 'raw', which multiplies no layers; expected 'rollout' or "
                "'attribution'. Single maps are returned by captum_ssm.hidden_attention."
            )
        arguments = Arguments(inputs, target, additional_forward_args, position)
        maps = self._maps(arguments, options, start_layer=start_layer, query=False)
        with self._computing():
            return maps.frozen.mask_matrix(rollout_matrix(maps))
