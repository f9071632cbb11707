"""Whether a training goes wrong, from what it measures at each step: a pure function of the steps so far.

Each detector looks at one way in which training is lost, and names it once. Thresholds are wide: a healthy run must not be stopped, and what is lost
stays lost for long enough to be seen within some dozens of steps. Both are tested on curves made up for it (`tests/recipes/test_watch.py`).
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

Trouble = Literal["not_finite", "divergence", "dead_gradients", "reward_collapse", "over_optimisation", "zero_variance", "kl_blow_up", "mismatch"]

WINDOW: Final = 10
"""Steps that a detector takes together."""
DIVERGED_NATS: Final = 0.5
DIVERGED_TIMES: Final = 1.5
"""A loss is lost where its median is over the best one by both: so many nats, and so many times."""
BEGAN_NATS: Final = 1.0
BEGAN_TIMES: Final = 2.0
"""The same beside the loss of the first step, which is that of the weights before any update, and of one batch alone."""
DEAD_NORM: Final = 1e-7
"""A gradient that no optimizer moves anything by; clipping and scaling come after it."""
LEARNT_LOSS: Final = 1e-4
"""Below it there is nothing left to learn, and small gradients are right."""
COLLAPSED_SHARE: Final = 0.5
"""Of the best mean reward above the first that is lost again."""
NOISE_TIMES: Final = 8.0
"""Standard errors of a mean reward that may be chance."""
LOST_SHARE: Final = 0.1
"""Of the best that a held-out grader said, which is lost for good where more than chance is, too."""
SAME_SHARE: Final = 0.95
"""Groups rewarded alike, of all: the rest teaches next to nothing."""
KL_NATS: Final = 1.0
"""Per token, to the weights that training began with."""
MISMATCH_K3: Final = 0.01
"""Between sampler and trainer, of tokens of the newest weights: what vendors publish as their bar."""


class Alarm(NamedTuple):
    """What is wrong since about which step, and what to change."""

    trouble: Trouble
    step: int
    message: str


class ConvergenceWatch:
    """Fed step by step; each trouble is told once."""

    def __init__(self) -> None:
        self._told: set[Trouble] = set()
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._first_loss, self._best_loss = math.nan, math.inf
        self._rewards: deque[float] = deque(maxlen=WINDOW)
        self._first_reward: float | None = None
        self._best_reward = -math.inf
        self._noises: list[float] = []
        """Of rewards, from one step to the next."""
        self._held_out: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        """What the held-out grader said, and the rewards of the same steps."""
        self._best_held_out = (-math.inf, math.inf)
        self._held_out_noises: list[float] = []
        self._in_a_row: dict[Trouble, int] = {}

    def look(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """What is wrong at this step that was not told before."""
        found = [self._not_finite(values), self._divergence(values), self._dead(values), self._collapse(values), self._hollow(values)]
        found += self._persistent(values)
        alarms = [Alarm(trouble, step, message) for trouble, message in filter(None, found) if trouble not in self._told]
        self._told |= {alarm.trouble for alarm in alarms}
        return alarms

    def _not_finite(self, values: Mapping[str, float]) -> tuple[Trouble, str] | None:
        broken = [name for name in ("loss", "gradient_norm", "evaluation/loss") if not math.isfinite(values.get(name, 0.0))]
        return ("not_finite", f"{broken[0]} is no finite number: lower the learning rate, or clip gradients (`grad_clip_norm`)") if broken else None

    def _divergence(self, values: Mapping[str, float]) -> tuple[Trouble, str] | None:
        # Losses of policy gradients go up and down by themselves: what is learnt there is the reward.
        # A student's own loss goes up and down likewise: what it minimises is the distance to its teacher.
        loss = values.get("kl/teacher", values.get("loss", math.nan))
        if "reward/raw" in values or not math.isfinite(loss):
            return None
        self._losses.append(loss)
        self._first_loss = loss if math.isnan(self._first_loss) else self._first_loss
        if len(self._losses) < WINDOW:
            return None
        median = statistics.median(self._losses)
        self._best_loss = min(self._best_loss, median)
        # What was lost within the first steps has no better median behind it.
        for before, nats, times in ((self._best_loss, DIVERGED_NATS, DIVERGED_TIMES), (self._first_loss, BEGAN_NATS, BEGAN_TIMES)):
            if median > before + nats and median > times * before:
                return "divergence", f"the loss rose from {before:.3g} to {median:.3g}: lower the learning rate, or warm up for longer"
        return None

    def _dead(self, values: Mapping[str, float]) -> tuple[Trouble, str] | None:
        norm, loss = values.get("gradient_norm"), values.get("loss", math.inf)
        # Groups that were rewarded alike have no gradient, and a trouble of their own.
        dead = norm is not None and norm < DEAD_NORM and abs(loss) > LEARNT_LOSS and values.get("groups/trained", 1.0) > 0
        if self._row("dead_gradients", dead) < WINDOW:
            return None
        return "dead_gradients", f"gradients were zero for {WINDOW} steps while the loss is {loss:.3g}: is anything of the rows trained on?"

    def _collapse(self, values: Mapping[str, float]) -> tuple[Trouble, str] | None:
        if "reward/raw" not in values:
            return None
        self._rewards.append(values["reward/raw"])
        if len(self._rewards) < WINDOW:
            return None
        mean = statistics.fmean(self._rewards)
        self._first_reward = mean if self._first_reward is None else self._first_reward
        self._best_reward = max(self._best_reward, mean)
        self._noises.append(statistics.stdev(self._rewards))
        # The best of many means is above the others by chance alone.
        risen, noise = self._best_reward - self._first_reward, NOISE_TIMES * statistics.fmean(self._noises) / math.sqrt(WINDOW)
        # A policy that has learnt nothing yet can still lose what it began with.
        least = self._best_reward - max(COLLAPSED_SHARE * risen, COLLAPSED_SHARE * abs(self._first_reward), noise)
        if mean >= least:
            return None
        return (
            "reward_collapse",
            f"the mean reward fell from {self._best_reward:.3g} to {mean:.3g}: lower the learning rate, or raise `kl_coefficient`",
        )

    def _hollow(self, values: Mapping[str, float]) -> tuple[Trouble, str] | None:
        """The reward is higher than when another grader, which nothing is trained on, was content."""
        if "reward/held_out" not in values or "reward/raw" not in values:
            return None
        self._held_out.append((values["reward/held_out"], values["reward/raw"]))
        if len(self._held_out) < WINDOW:
            return None
        says, rewards = zip(*self._held_out, strict=True)
        said, reward = statistics.fmean(says), statistics.fmean(rewards)
        self._held_out_noises.append(statistics.stdev(says))
        self._best_held_out = max(self._best_held_out, (said, reward))
        best, reward_then = self._best_held_out
        noise = NOISE_TIMES * statistics.fmean(self._held_out_noises) / math.sqrt(WINDOW)
        if said >= best - max(noise, LOST_SHARE * abs(best)) or reward <= reward_then:
            return None
        return (
            "over_optimisation",
            f"the reward rose from {reward_then:.3g} to {reward:.3g} while the held-out grader fell from {best:.3g} to {said:.3g}: "
            "what is learnt pays and is not meant; attack the grader, mend it, or end at an earlier step",
        )

    def _persistent(self, values: Mapping[str, float]) -> list[tuple[Trouble, str] | None]:
        same, kl = values.get("groups/zero_variance_share", 0.0), values.get("kl/reference", 0.0)
        k3 = values.get("ratio/k3", 0.0) if values.get("lag/max", 0.0) == 0 else 0.0
        return [
            (
                "zero_variance",
                f"{same:.0%} of the groups were rewarded alike for {WINDOW} steps: begin where some answers are right already, "
                "or give other problems, or a grader that tells more apart",
            )
            if self._row("zero_variance", same >= SAME_SHARE) >= WINDOW
            else None,
            ("kl_blow_up", f"the policy is {kl:.2g} nats a token from where it began: lower the learning rate, or raise `kl_coefficient`")
            if self._row("kl_blow_up", kl > KL_NATS) >= 3
            else None,
            ("mismatch", f"sampler and trainer differ (k3 {k3:.2g}) on the same weights: `bloomery fidelity` says where")
            if self._row("mismatch", k3 > MISMATCH_K3) >= 3
            else None,
        ]

    def _row(self, trouble: Trouble, now: bool) -> int:
        self._in_a_row[trouble] = self._in_a_row.get(trouble, 0) + 1 if now else 0
        return self._in_a_row[trouble]
