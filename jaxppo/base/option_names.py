"""Options by the names of other systems: the error says what to write here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Self

# By the name of an option elsewhere (TRL, Tunix, verl, slime, NeMo-RL): the fields here that may
# stand for it.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "epsilon clip_epsilon clip_eps eps_clip clip_ratio clip_range cliprange": (
        "clip_low",
        "clip_high",
        "clip",
    ),
    "epsilon_low eps_clip_low clip_ratio_low clip_ratio_min ratio_clip_min": ("clip_low",),
    "epsilon_high eps_clip_high clip_ratio_high clip_ratio_max ratio_clip_max": ("clip_high",),
    "delta eps_clip_c clip_ratio_c ratio_clip_c": ("dual_clip",),
    "beta kl_coef kl_coeff kl_beta kl_loss_coef kl_penalty_coef coefficient": ("coef",),
    "kl_type kl_loss_type kl_estimator kl_penalty kl_penalty_mode": ("estimator",),
    "entropy_coeff entropy_bonus entropy_weight ent_coef": ("entropy_coef",),
    "loss_agg_mode loss_aggregation loss_aggregation_mode reduction": ("aggregation",),
    "policy_loss policy_loss_fn loss_fn loss_mode": ("loss",),
    "loss_type": ("link", "loss"),
    "rpo_alpha cpo_alpha sft_weight sft_loss_weight nll_weight": ("nll_coef",),
    "cliprange_value clip_range_vf value_clip value_clip_range": ("clip",),
    "gamma simpo_gamma target_reward_margin": ("margin",),
    "cap threshold clip_max tis_cap tis_clip tis_imp_ratio_cap rollout_is_threshold": ("high",),
    "temperature_positive tau_pos sapo_temperature_pos": ("tau_positive",),
    "temperature_negative tau_neg sapo_temperature_neg": ("tau_negative",),
}
_FIELDS_BY_NAME = {name: fields for names, fields in _FIELDS.items() for name in names.split()}


def same_here(name: str, value: Any, fields: Any) -> str | None:
    """What to write for an option of another system, such as "clip_low=0.2, clip_high=0.2"; None
    if it is unknown.
    """
    shown = repr(value)
    if isinstance(value, str):
        shown = "..."  # names of values differ too
    return (
        ", ".join(f"{field}={shown}" for field in _FIELDS_BY_NAME.get(name, ()) if field in fields)
        or None
    )


class NamesItsOptions:
    """A dataclass whose constructor says what to write in place of an option that it lacks."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        known = inspect.signature(cls.__init__).parameters
        free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        for name, value in options.items():
            if not free and name not in known:
                raise TypeError(
                    f"{name}: got {value!r} for {cls.__name__}, expected"
                    f" {cls._in_place_of(name, value)}"
                )
        return super().__new__(cls)

    @classmethod
    def _in_place_of(cls, name: str, value: Any) -> str:
        """What to write for an option that this class lacks."""
        fields = [field for field in inspect.signature(cls.__init__).parameters if field != "self"]
        same = same_here(name, value, fields)
        if same is not None:
            return same
        if not fields:
            return "no options"
        return f"one of {', '.join(fields)}"
