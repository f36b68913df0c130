"""The settings of every training, as files that users can change and run again with `posttrain train`."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of data and runs."""

    worked: int = 27_000  # demonstrations that show their working
    bare: int = 9_000  # and that do not
    sft_steps: int = 1800
    problems: int = 2000  # answered for preference pairs
    samples: int = 6  # replies to each of them
    reward_steps: int = 100
    dpo_steps: int = 100
    ppo_steps: int = 16
    grpo_steps: int = 30
    held_out: int = 1000  # problems of the final measurement


def settings_files(folder: Path, seed: int, size: Size) -> dict[str, str]:
    """Name of each stage -> its YAML. Settings that are not written have their defaults."""
    common = f"output_dir: {json.dumps(str(folder))}\nseed: {seed}\ndevices: {{type: cpu}}"
    return _offline(common, size) | _online(common, size)


def _offline(common: str, size: Size) -> dict[str, str]:
    return {
        "sft": f"""\
# Supervised fine-tuning: the model learns to write worked solutions by imitating them.
name: sft
{common}
model: {{path: "${{output_dir}}/model"}}
method: sft
data:
  source:
    - {{source: "builtin:arithmetic", max_rows: {size.worked}}}   # a worked solution to each problem
    - {{source: "${{output_dir}}/bare.jsonl"}}                # only the answer, for other problems
  template: tags                       # the working between tags, then the solution between tags
  max_length: 128
  validation: {{rows: 200}}
training:
  batch_size: 20
  tokens_per_pack: 2048
  learning_rate: 2.5e-3                # high: a tiny model that starts from nothing
  adam_beta2: 0.95
  max_steps: {size.sft_steps}
evaluation: {{eval_steps: {max(1, size.sft_steps // 6)}}}
tracking: {{logging_steps: {max(1, size.sft_steps // 16)}}}
""",
        "reward": f"""\
# A reward model: learns from pairs which of two replies is better, and then scores any reply.
name: reward
{common}
model: {{path: "${{output_dir}}/sft/final"}}    # starts from the SFT model, with a new head
method: reward
data:
  source: "${{output_dir}}/pairs/train.jsonl"
  template: tags
  max_length: 128
  validation: {{source: "${{output_dir}}/pairs/test.jsonl"}}
training: {{batch_size: 32, tokens_per_pack: 2048, learning_rate: 1.0e-3, max_steps: {size.reward_steps}}}
evaluation: {{eval_steps: {max(1, size.reward_steps // 5)}}}
tracking: {{logging_steps: {max(1, size.reward_steps // 10)}}}
""",
        "dpo": f"""\
# DPO: makes the better reply of each pair more likely and the worse one less likely, without a reward model.
name: dpo
{common}
model: {{path: "${{output_dir}}/sft/final"}}    # initial policy and reference model
method: {{type: dpo, loss_type: [sigmoid], beta: 1.0}}
data:
  source: "${{output_dir}}/pairs/train.jsonl"
  template: tags
  max_length: 128
  validation: {{source: "${{output_dir}}/pairs/test.jsonl"}}
training: {{batch_size: 32, tokens_per_pack: 2048, learning_rate: 1.0e-4, max_steps: {size.dpo_steps}}}
evaluation: {{eval_steps: {max(1, size.dpo_steps // 5)}}}
tracking: {{logging_steps: {max(1, size.dpo_steps // 10)}}}
""",
    }


def _online(common: str, size: Size) -> dict[str, str]:
    return {
        "ppo": f"""\
# PPO: the model samples replies, the reward model scores them, and a value head predicts the expected reward.
name: ppo
{common}
model: {{path: "${{output_dir}}/sft/final"}}    # initial policy, and reference of the KL penalty
method: {{type: ppo, num_generations: 2, num_ppo_epochs: 2, num_minibatches: 2, kl_coef: 0.3}}
rewards:
  - {{type: model, path: "${{output_dir}}/reward/final"}}
{online(size.problems)}
training: {{batch_size: 64, tokens_per_pack: 4096, learning_rate: 1.0e-4, max_steps: {size.ppo_steps}}}
evaluation: {{eval_steps: {max(1, size.ppo_steps // 4)}}}
tracking: {{logging_steps: {max(1, size.ppo_steps // 10)}}}
""",
        "grpo": f"""\
# GRPO: of eight replies to a problem, those with above-average rewards become more likely; a rule gives the reward.
name: grpo
{common}
model: {{path: "${{output_dir}}/sft/final"}}
method: {{type: grpo, num_generations: 8, beta: 0.02}}
rewards:
  - {{type: check_numbers}}              # 3 for the right number in the solution tags, else -1.5
{online(size.problems)}
training: {{batch_size: 32, tokens_per_pack: 4096, learning_rate: 3.0e-4, max_steps: {size.grpo_steps}}}
evaluation: {{eval_steps: {max(1, size.grpo_steps // 4)}}}
tracking: {{logging_steps: {max(1, size.grpo_steps // 10)}}}
""",
    }


def online(problems: int) -> str:
    """The common settings of the methods that sample replies."""
    return f"""\
data:
  source: "builtin:arithmetic"
  max_rows: {problems}
  template: tags
  max_length: 128
  validation: {{rows: 100}}
rollout: {{max_completion_length: 56}}"""
