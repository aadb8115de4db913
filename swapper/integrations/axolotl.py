"""Makes axolotl train an offloaded model, by its configuration alone: `SwapperPlugin`.

plugins: [swapper.integrations.axolotl.SwapperPlugin]
swapper_run: /nvme/run
swapper_options: {params: nvme, optimizer_state: nvme}
"""

from __future__ import annotations

from typing import Any

from axolotl.core.trainers import AxolotlTrainer
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from swapper.errors import ConfigError, UnsupportedError
from swapper.integrations.trainer import offloaded

OTHER_TRAINERS = ("rl", "reward_model", "process_reward_model", "trainer_cls")
"""Keys of a configuration that make axolotl choose another Trainer than AxolotlTrainer."""


class SwapperArgs(BaseModel):
    """What the plugin adds to a configuration.

    Attributes:
        swapper_run, swapper_options: as `manager` and `options` of `swapper.integrations.trainer.offloaded`.
    """

    swapper_run: str | None = None
    swapper_options: dict[str, object] | None = None


class SwapperPlugin(BasePlugin):  # type: ignore[misc]
    """Gives axolotl an AxolotlTrainer that is offloaded."""

    def get_input_args(self) -> str:
        return f"{__name__}.{SwapperArgs.__name__}"

    def get_trainer_cls(self, cfg: Any) -> Any:
        """Return the Trainer's class for the configuration.

        Raises:
            ConfigError: `swapper_run` is missing.
            UnsupportedError: the configuration asks for another Trainer.
        """
        if not cfg.swapper_run:
            raise ConfigError("swapper_run: is missing in axolotl's configuration: name a directory on the NVMe drive")
        for key in OTHER_TRAINERS:
            if cfg.get(key):
                raise UnsupportedError(f"{key}: makes axolotl choose a Trainer unknown to SwapperPlugin: leave it out")
        return offloaded(AxolotlTrainer, cfg.swapper_run, **dict(cfg.swapper_options or {}))
