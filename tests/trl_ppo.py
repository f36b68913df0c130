"""TRL 1.12's PPOTrainer on given completions, in a process of its own: `python trl_ppo.py JOB`.

JOB is a JSON file: `model`, `prompts` and, for each step, `completions` with the token ids sampled for each prompt, and
their `scores`; `settings` of PPOConfig; `output`, where the last weights go, with TRL's metrics in their header. TRL's
own generation and reward model are replaced by what is given. Its value model is a head on the policy's own backbone,
as ours is. TRL 1.12 has to come before other versions on PYTHONPATH.
"""

import json
import sys
from pathlib import Path

import torch
import trl
from datasets import Dataset
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from benchmarks.common import TRL_SETTINGS

assert trl.__version__ == "1.12.0", trl.__version__


class Critic(nn.Module):
    """What TRL wants of a value model, beside the policy."""

    base_model_prefix = "model"

    def __init__(self, policy):
        super().__init__()
        self.model = policy.model
        self.score = nn.Linear(policy.config.hidden_size, 1)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)


class Judge(nn.Module):
    """Stands where the reward model would."""


def main(job: dict) -> None:
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    prompts = [tuple(prompt) for prompt in job["prompts"]]
    batch = len(prompts)
    policy, reference = (AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32) for _ in range(2))
    coming, now = iter(zip(job["completions"], job["scores"], strict=True)), {}

    def sampled(model, queries, _size, pad, _config):
        completions, scores = next(coming)
        places = [prompts.index(tuple(token for token in query if token != pad)) for query in queries.tolist()]
        assert sorted(places) == list(range(batch)), "TRL asks for other prompts"
        now["scores"] = torch.tensor([scores[place] for place in places])
        whole = torch.cat([queries, torch.tensor([completions[place] for place in places])], 1)
        logits = ppo_trainer.forward(model, whole, pad).logits[:, queries.shape[1] - 1 : -1]
        return whole, logits / (job["settings"]["temperature"] + 1e-7)

    def reward(model, *arguments, own=ppo_trainer.get_reward):
        return (None, now["scores"], None) if isinstance(model, Judge) else own(model, *arguments)

    ppo_trainer.batch_generation, ppo_trainer.get_reward = sampled, reward
    config = PPOConfig(
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        total_episodes=batch * len(job["completions"]),
        local_rollout_forward_batch_size=batch,
        response_length=len(job["completions"][0][0]),
        num_sample_generations=0,
        num_mini_batches=1,
        **TRL_SETTINGS,
        **job["settings"],
    )
    rows = Dataset.from_list([{"input_ids": list(prompt)} for prompt in prompts])
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=Judge(),
        value_model=Critic(policy),
        train_dataset=rows,
        eval_dataset=rows,
    )
    trainer.train()
    assert next(coming, None) is None
    weights = {name: parameter.detach().contiguous() for name, parameter in policy.named_parameters()}
    save_file(weights, job["output"], {"log": json.dumps(trainer.state.log_history)})


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
