"""The settings of distillation."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from posttrain.config.schema.base import Float, Place, Positive, Problems, Share
from posttrain.config.schema.online import OnlineMethod

DivergenceName = Literal["reverse_kl", "forward_kl", "jsd"]


class DistillMethod(OnlineMethod):
    """On-policy distillation: a teacher scores every token of the student's completions."""

    learning_rates = (1e-5, 1e-4)
    loss_setting = "divergence"
    example = ("Qwen/Qwen3-0.6B-Base", "gsm8k")

    type: Literal["distill"] = Field(default="distill", description="On-policy distillation from a teacher.")
    teacher: Place | None = Field(
        default=None,
        description="Hub id or folder of the teacher, with the same tokenizer; null: the model itself before training.",
    )
    teacher_system_prompt: str | None = Field(
        default=None, description="System prompt of the teacher instead of data.system_prompt; null: the same prompt."
    )
    num_generations: Positive = Field(default=1, description="Number of completions of each prompt.")
    divergence: DivergenceName = Field(
        default="reverse_kl", description="Divergence between student and teacher to minimise at every token."
    )
    jsd_beta: Share = Field(
        default=0.5, description="Weight of the teacher in jsd; 0 is the forward KL, 1 the reverse KL."
    )
    on_policy_fraction: Annotated[Float, Field(ge=0, le=1)] = Field(
        default=1.0,
        description="Share of the prompts that the student completes; the rest have the data's completion.",
    )

    @model_validator(mode="before")
    @classmethod
    def _former_name(cls, values: Any) -> Any:
        """Runs of earlier versions saved `jensen_shannon`."""
        former = isinstance(values, dict) and values.get("divergence") == "jensen_shannon"
        return values | {"divergence": "jsd"} if former else values

    def reads(self, setting: str) -> bool:
        return super().reads(setting) and (setting != "jsd_beta" or self.divergence == "jsd")

    @model_validator(mode="after")
    def _check(self) -> "DistillMethod":
        problems = Problems()
        problems.check(
            self.teacher is not None or self.teacher_system_prompt is not None,
            "teacher",
            "is missing: name a model to learn from, or give teacher_system_prompt to learn from the model itself with "
            "another prompt",
        )
        problems.check(
            self.jsd_beta == 0.5 or self.divergence == "jsd",
            "jsd_beta",
            f"is read by divergence: jsd only, not by {self.divergence}; leave it out",
        )
        problems.report()
        return self
