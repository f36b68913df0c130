"""The settings of distillation."""

from typing import Literal

from posttrain.config.schema.base import Conflicts, setting
from posttrain.config.schema.online import OnlineMethod
from posttrain.config.schema.types import Float, ModelPath, Positive, Share, Text, ZeroToOne

# The teacher's last message in TRL's SDFT and, for a successful completion, in its SDPO.
SDFT_TEMPLATE = "{prompt}\n\n{privileged_context}"
SDPO_TEMPLATE = "{prompt}\nCorrect solution:\n\n{privileged_context}\n\n\n\nCorrectly solve the original question.\n"

# Settings of distillation that choose a model as the teacher, or its prompt.
TEACHERS = (
    "teacher", "teacher_model_kind", "teacher_system_prompt", "privileged_context", "use_successful_as_teacher",
)  # fmt: skip


class DistillMethod(OnlineMethod):
    """On-policy distillation: a teacher scores every token of the student's completions."""

    learning_rates = (1e-5, 1e-4)
    loss_setting = "divergence"
    read_by = (("jsd_beta", frozenset({"jsd"})),)
    example = ("Qwen/Qwen3-0.6B-Base", "gsm8k")

    type: Literal["distill"] = setting("distill", "On-policy distillation from a teacher.")
    teacher: ModelPath | None = setting(
        None, "Hub id or folder of the teacher, with the same tokenizer; null: the model itself before training."
    )
    teacher_model_kind: Literal["base", "live"] = setting(
        "base", "Weights of the model as its own teacher: base: before training; live: the current ones."
    )
    teacher_logprobs: Text | None = setting(
        None, "Column with a teacher's top log-probabilities of the data's completions; null: the teacher is a model."
    )
    teacher_system_prompt: str | None = setting(
        None, "System prompt of the teacher; null: the student's, data.system_prompt."
    )
    privileged_context: Text | None = setting(
        None, "Column that only the teacher's prompt has, such as the completion as a demonstration; null: none."
    )
    use_successful_as_teacher: bool = setting(
        False, "Whether the teacher's prompt has another, successful completion of the same prompt (SDPO)."
    )
    success_reward_threshold: Float = setting(1.0, "Reward from which on a completion is successful.")
    teacher_prompt_template: Text | None = setting(
        None, "The teacher's last message, with {prompt} and {privileged_context}; null: that of SDFT or SDPO in TRL."
    )
    num_generations: Positive = setting(1, "Number of completions per prompt.")
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = setting(
        "reverse_kl", "Divergence between student and teacher to minimise at every token."
    )
    jsd_beta: Share = setting(0.5, "Weight of the teacher in jsd; 0 is the forward KL, 1 the reverse KL.")
    on_policy_fraction: ZeroToOne = setting(
        1.0, "Share of the prompts that the student completes; the rest use the data's completions."
    )

    @property
    def prompts_teacher(self) -> bool:
        return self.teacher_system_prompt is not None or self.shows_context

    @property
    def shows_context(self) -> bool:
        """Whether the teacher's prompts have something that the student's lack."""
        return self.privileged_context is not None or self.use_successful_as_teacher

    @property
    def context_template(self) -> str:
        """The last message of the teacher's prompts, with {prompt} and {privileged_context}."""
        default = SDPO_TEMPLATE if self.use_successful_as_teacher else SDFT_TEMPLATE
        return default if self.teacher_prompt_template is None else self.teacher_prompt_template

    @property
    def avoids_second_model(self) -> bool:
        is_live = self.teacher is None and self.teacher_model_kind == "live"
        return is_live or self.teacher_logprobs is not None

    @property
    def refers_to_itself(self) -> bool:
        return super().refers_to_itself and not self.avoids_second_model

    def check(self) -> Conflicts:
        yield from super().check()
        if self.teacher_logprobs is not None:
            if self.on_policy_fraction > 0:
                yield "on_policy_fraction", "must be 0 with teacher_logprobs, which are those of the data's completions"
            for name in TEACHERS:
                if not self.is_default(name):
                    yield name, "has no effect with teacher_logprobs, which come from the data; leave it out"
        elif self.teacher is None and not self.prompts_teacher:
            yield (
                "teacher",
                "is missing: name a model to learn from, or give teacher_system_prompt, privileged_context or "
                "use_successful_as_teacher to learn from the model itself with another prompt",
            )
        if self.teacher is not None and self.teacher_model_kind == "live":
            yield "teacher_model_kind", "is live, but teacher names another model; leave one of them out"
        if self.teacher_prompt_template is not None:
            if not self.shows_context:
                yield "teacher_prompt_template", "has no effect without privileged_context or use_successful_as_teacher"
            elif any(part not in self.teacher_prompt_template for part in ("{prompt}", "{privileged_context}")):
                yield "teacher_prompt_template", "must contain {prompt} and {privileged_context}"
        yield from self.unused("use_successful_as_teacher", "success_reward_threshold")
        if not self.use_successful_as_teacher:
            return
        for name in ("teacher_system_prompt", "privileged_context"):
            if getattr(self, name) is not None:
                yield name, "cannot be combined with use_successful_as_teacher; leave it out"
        if self.num_generations <= 1:
            yield "num_generations", "is 1, but use_successful_as_teacher needs other completions of a prompt"
        if self.on_policy_fraction < 1:
            yield ("on_policy_fraction", "must be 1 with use_successful_as_teacher: the data has only one completion")
