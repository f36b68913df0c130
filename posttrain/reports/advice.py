"""What each alarm of an online run means, and what helps (docs/guide.md). `posttrain.training.alarms` raises them."""

MESSAGES = {
    "no_spread": "no group has completions with different rewards, so nothing can be learned from this step: the "
    "task is too hard or too easy for this model, or the reward is broken",
    "equal_rewards": "all completions of this step have the same reward, so the rewards teach nothing: the task is too "
    "hard or too easy for this model, or the reward is broken",
    "no_reward": "no completion has a reward, so this step trained nothing: check whether the data has the answers "
    "that the rewards need (posttrain why RUN --step 1 --prompt 0), or why your own function returns None or takes "
    "longer than its timeout, or a judge does not answer",
    "truncated": "every completion reached rollout.max_completion_length: raise it, or check whether the stop token is "
    "the one that the model was trained with",
    "no_verdict": "more than 0.5 % of the completions have no verdict (timeout, crashed, bad_gold) and are dropped",
    "entropy": "the entropy has fallen below 5 % of the first step's: the policy hardly explores; lower "
    "training.learning_rate, or raise method.beta or method.entropy_coef",
    "sampler": "the engine's probabilities differ from the trainer's: the effective sample size is below 90 % of the "
    "number of tokens",
}
