"""Names of settings in other systems, and what to write instead: for messages, docs/migrating.md and imports."""

import re

from posttrain.config.reading.layers import ALIASES
from posttrain.config.schema.methods import PPO_NAMES

_SOURCE = "write data.source, a hub id (owner/name/subset), a file or a folder"
_VALIDATION = "write data.validation, e.g. {ratio: 0.05}, {rows: 500} or {source: ..., split: test}"
_PACKED = "examples are always packed, without padding; training.tokens_per_pack is the size of a pack"
_TEMPLATE = "write data.template: chat (the tokenizer's own), a name such as tags or r1_zero, or a .jinja file"
_CACHED = "leave it out: tokens are cached, and reused while data and settings are the same"
_BATCH = "write training.batch_size: the examples (pairs, prompts) of a step, over all devices"
_FOLLOWS = "leave it out: it follows from training.batch_size and training.tokens_per_pack"
_METHOD = "write method.type: sft, reward, dpo, ipo, kto, orpo, cpo, simpo, ppo, grpo, rloo, distill …"
_WEIGHTED = "write method.loss_type, a list of losses, and method.loss_weights, e.g. [sigmoid, sft] and [1.0, 0.1]"
_REWARDS = "write rewards, e.g. [{type: math}, {type: python, function: 'my_rewards:brevity', weight: 0.1}]"
_QUANTISED = "quantise it with posttrain quantize MODEL --to int8 or nf4, and give the new folder as its path"
_RULES = (
    "each rule is an entry of rewards: match_format_exactly, match_format_approximately, check_answer, check_numbers"
)
_BEST = "write checkpoint.best_metric, e.g. eval_loss; best/ is kept next to final/"
_RESUME = "train with --resume, or --resume FOLDER; the settings come from the checkpoint"
_TRACKING = "write tracking: {report_to: [tensorboard], ...}; curves and a log are always written"
_STAGES = "write stages, e.g. {sft: {method: sft}, grpo: {method: grpo, init_from: sft}}, each with its own training"

_ADAPTER = "write model.lora: true, or {r: 16}; leave it out to train all weights"
_KERNEL = "leave it out: proven families are packed with a kernel of posttrain's; model.attention names another"
_LOADER = "leave it out: tokens are cached in a file that needs no worker processes"
_PER_EPOCH = "not supported: intervals are numbers of steps, evaluation.eval_steps and checkpoint.save_steps"
_WEIGHTS = "leave it out: weights are per token, and method.importance_sampling_cap: null turns them off"
_LOSSES = "not supported: no loss here has this term; method.loss_type lists the losses"

# Hint -> the names that it explains. No such name is a setting here; docs/migrating.md lists the names by system.
# `write PATH` alone, or before a comma or semicolon, means that the setting takes the name's value; `write PATH: WORD`
# that it takes this word if the name's value is true (see `target`).
_NAMES = {
    # models
    "write model.path": "model_name_or_path model_name huggingface_id sft_model_path base_model",
    "write model.revision": "model_revision",
    "write method.ref_model": "ref_model_id",
    "write method.router_aux_loss_coef": "moe_aux_loss_coef",
    "write model.attention": "attn_implementation flash_attn",
    _KERNEL: "flash_attention sdp_attention xformers_attention eager_attention flex_attention",
    "write model.dtype, one of float32, bfloat16": "torch_dtype infer_dtype",
    "write model.dtype: bfloat16": "bf16 pure_bf16",
    "write model.dtype: bfloat16; float16 is not supported": "fp16",
    _ADAPTER: "use_lora use_peft peft finetuning_type adapter",
    "write model.lora.r": "lora_rank",
    "write model.lora.target_modules, one of auto, all-linear, a list": "lora_target",
    "write model.lora.target_modules: all-linear": "lora_target_linear",
    "write model.lora.use_dora": "peft_use_dora",
    "write model.lora.use_rslora": "peft_use_rslora",
    "write model.lora.modules_to_save, or for added tokens model.new_tokens": "lora_modules_to_save additional_target",
    "write model.load_in_4bit: true, with model.lora": "quantization_bit",
    "not supported: training in 8 bits; write model.load_in_4bit: true, with model.lora": "load_in_8bit",
    "leave it out: 4 bits are NF4 with nested scales": "bnb_4bit_quant_type use_bnb_nested_quant",
    "write model.path: an adapter matching model.lora is trained further, others are merged": "adapter_name_or_path "
    "lora_model_dir",
    "leave it out: it follows from the model": "model_type tokenizer_type tokenizer_config is_llama_derived_model",
    "not supported: special tokens are the tokenizer's; model.new_tokens adds tokens": "special_tokens tokens "
    "pad_token eos_token",
    "write rollout.engine: embedded, which needs no vLLM, or vllm": "fast_inference use_vllm",
    "write environments: [{name: ..., class: my_env.py:Env}]": "environment_factory",
    "write rollout.max_turns, which is one more: N iterations have N + 1 replies": "max_tool_calling_iterations",
    # data
    _SOURCE: "dataset dataset_name dataset_dir data_path train_file",
    "append it to the data set's name: data.source: owner/name/subset": "dataset_config subset",
    f"{_SOURCE}, in the SFT stage": "sft_dataset_name",
    f"{_SOURCE}, in the GRPO stage": "grpo_dataset_name",
    "write data.split": "dataset_train_split sft_dataset_split grpo_dataset_split",
    _VALIDATION: "eval_dataset dataset_test_split val_size val_set_size test_datasets validation_split "
    "train_validation_split validation_file",
    "write data.columns, e.g. {chosen: better}": "prompt_column chosen_column rejected_column dataset_text_field",
    "write data.max_rows": "subset_size num_prompts max_train_samples",
    "write data.max_rows; of several data sets, max_rows in each entry of data.source": "max_samples",
    "write data.max_length, in tokens of prompt and completion": "max_seq_length cutoff_len "
    "model_max_length sequence_len",
    "write data.max_prompt_length: p90": "max_length_percentile",
    "write data.overlong, one of drop, truncate, error": "truncation truncation_mode truncate_ratio",
    _PACKED: "packing neat_packing padding_free packing_strategy pad_to_multiple_of sample_packing eval_sample_packing "
    "pad_to_sequence_len eval_packing group_by_length",
    "write data.shuffle, which is true for random, false for sequential": "train_sampling_strategy",
    "leave it out: rows are shuffled unless data.shuffle is false": "shuffle_dataset disable_shuffling",
    "write data.source: a list of {source: ..., weight: ...}": "mix_strategy interleave_probs",
    "write method.completion_only_loss: false": "train_on_prompt train_on_inputs",
    "write method.assistant_only_loss: true": "train_on_responses_only",
    "write method.completion_only_loss: true, which trains only on the last turn": "mask_history",
    _TEMPLATE: "chat_template_path chat_template prompt prompt_path",
    "write data.chat_template_kwargs: {enable_thinking: false}": "enable_thinking",
    "write data.system_prompt": "system_prompt_template",
    _CACHED: "preprocessing_num_workers dataset_num_proc overwrite_cache dataset_prepared_path dataset_processes",
    _LOADER: "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor remove_unused_columns",
    "not supported: rows are read once and cached; data.max_rows limits them": "streaming dataset_streaming",
    "not supported: rows whose answer a reward cannot read are counted as bad_gold": "filter_numeric_only",
    # the optimisation
    _BATCH: "per_device_train_batch_size micro_batch_size train_batch_size rollout_batch_size",
    "leave it out: training.tokens_per_pack also limits the memory of evaluation": "per_device_eval_batch_size "
    "eval_batch_size",
    _FOLLOWS: "gradient_accumulation_steps grad_accum grad_accum_steps",
    "write training.learning_rate": "lr",
    "write training.num_train_epochs": "epochs num_epochs",
    "write training.max_steps": "steps n_grpo_steps",
    "write training.max_steps: the episodes divided by the completions of a step": "total_episodes",
    "write training.lr_scheduler_type": "lr_scheduler",
    "not supported: the schedules have no further settings": "lr_scheduler_kwargs cosine_min_lr_ratio",
    "write training.warmup_steps; below 1 it is a share of all steps": "warmup_ratio",
    "write training.optimizer, one of adamw, adamw_8bit, adamw_cpu_offload": "optim",
    "write training.gradient_checkpointing": "use_gradient_checkpointing",
    "leave it out: gradient checkpointing needs no settings": "gradient_checkpointing_kwargs",
    "leave it out: a step that is not finite is skipped and counted": "loss_watchdog_threshold loss_watchdog_patience",
    "leave it out: posttrain sets it": "tf32 local_rank ds3_gather_for_generation",
    "write training.gradient_checkpointing: true, or training.optimizer: adamw_cpu_offload": "activation_offloading",
    "write seed": "random_state",
    "leave it out: SFT trains with the model's dropout, other methods without dropout": "disable_dropout",
    "not supported": "neftune_noise_alpha",
    # methods
    _METHOD: "post_training stage rl",
    "write method.beta": "dpo_beta pref_beta rl_beta orpo_alpha",
    "write method.loss_type, one of its losses; orpo and simpo are methods: method.type": "pref_loss dpo_loss_type",
    _WEIGHTED: "pref_ftx rpo_alpha",
    "write method.label_smoothing": "dpo_label_smoothing",
    "write method.teacher, with method.type: distill": "teacher_model_name_or_path",
    "write method.on_policy_fraction": "lmbda",
    "not supported: write the teacher's completions with `posttrain generate`, and train on them with SFT": "seq_kd",
    "write method.desirable_weight": "kto_chosen_weight kto_desirable_weight",
    "write method.undesirable_weight": "kto_rejected_weight kto_undesirable_weight",
    "write method.whiten_rewards": "ppo_whiten_rewards",
    "write method.num_minibatches, counted in batches of the optimizer": "ppo_buffer_size",
    _LOSSES: "ld_alpha use_weighting pref_bco_weight delta top_entropy_quantile off_policy_mask_threshold",
    "not supported: the KL is not multiplied by the ratio to the old policy": "use_bias_correction_kl",
    "write method.num_minibatches": "num_mini_batches",
    "write method.num_iterations (ppo: method.num_ppo_epochs)": "epochs_per_rollout_batch",
    "write method.num_minibatches; training.batch_size counts the prompts of a step": "steps_per_generation",
    "write training.batch_size (prompts) and method.num_generations (completions of each)": "generation_batch_size",
    "write method.target_kl": "ppo_target",
    "write method.scale_rewards, one of group, batch, none": "use_std_normalization",
    "leave it out: it is fixed": "advantage_eps",
    "write method.importance_sampling_cap, which is per token; null: no weights": "vllm_importance_sampling_cap "
    "vllm_importance_sampling_clip_max",
    _WEIGHTS: "vllm_importance_sampling_correction vllm_importance_sampling_mode",
    "not supported: a reference is fixed; start another stage with init_from": "sync_ref_model "
    "ref_model_mixup_alpha ref_model_sync_steps",
    # rewards
    _REWARDS: "reward_funcs reward reward_weights reward_fn",
    "write rewards: [{type: model, path: FOLDER}], or {type: model, from: STAGE}": "reward_model_path "
    "reward_model reward_model_name_or_path",
    "leave it out: how the reward model was trained follows from its folder": "reward_model_type",
    "not supported: weighted rewards are summed": "multi_objective_aggregation",
    _QUANTISED: "rm_quant_type ref_quant_type",
    _RULES: "use_format_exact use_format_approximate use_answer_check use_number_check",
    "write rewards: [{type: overlong, cache: 64}, ...]": "eos_penalty missing_eos_penalty",
    "leave it out: every completion is stored; posttrain rollouts RUN shows them": "print_every_steps",
    # completions
    "write rollout: temperature, top_p, top_k, ...": "vllm_sampling sampling_params",
    "write rollout.max_completion_length": "max_new_tokens response_length sampling_max_tokens max_tokens",
    "write rollout.temperature": "sampling_temperature",
    "leave it out; rollout.stop ends completions": "sampling_min_tokens include_stop_str_in_output",
    "write rollout.vllm.mode": "vllm_mode",
    "write rollout.vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "write rollout.vllm.base_url": "vllm_server_base_url",
    "write rollout.vllm.timeout": "vllm_server_timeout",
    "not supported: sampling has no penalty on repetition; rewards have: {type: repetition}": "repetition_penalty",
    "leave it out: every completion is stored; see posttrain rollouts RUN": "log_completions num_completions_to_print",
    "write rollout.save": "save_rollouts",
    # evaluation, saving, tracking
    "write evaluation.eval_steps; -1: never": "eval_strategy evaluation_strategy",
    "write evaluation.num_batches": "eval_num_batches",
    "write data.validation: {source: ..., max_rows: ...}": "max_eval_samples",
    _PER_EPOCH: "evals_per_epoch saves_per_epoch",
    "write data.validation, e.g. {rows: 128}": "eval_num_prompts num_test_problems",
    "write data.validation: {source: problems.jsonl}": "test_problems",
    "write evaluation.at_start": "eval_on_start",
    "write checkpoint.save_steps": "save_strategy",
    "leave it out: final/ is always kept, and checkpoints are safetensors": "save_model save_only_model "
    "save_safetensors",
    _BEST: "load_best_model_at_end metric_for_best_model",
    "write checkpoint.best_direction: higher or lower; known for posttrain's own metrics": "greater_is_better",
    "write checkpoint, e.g. {best_metric: eval_loss, early_stopping_patience: 3}; --resume resumes": "finetuning",
    "write checkpoint.early_stopping_patience": "early_stopping early_stopping_steps",
    _RESUME: "resume_from_checkpoint resume_from",
    "train with --overwrite": "overwrite_output_dir",
    _TRACKING: "logging log_level plot_loss logging_first_step",
    "write tracking.project, with tracking.report_to: [wandb]": "wandb_project",
    "write tracking.logging_steps": "log_every logging_strategy",
    "write tracking.logging_dir, with tracking.report_to: [tensorboard]": "log_dir",
    "write name": "run_name wandb_name",
    "write output_dir and name: the model is in {output_dir}/{name}/final": "save_path",
    "after training: posttrain export RUN --push-to-hub ID": "push_to_hub hub_model_id",
    "leave it out: posttrain score FOLDER FILE gives the reward of any rows": "error_analysis_samples",
    # the machine
    "write devices.ids, e.g. [0]": "gpu device_ids",
    "write devices.strategy: fsdp, and start it with posttrain launch FILE --nproc N": "deepspeed fsdp",
    "start it with posttrain launch FILE --nproc N, or write devices.ids, e.g. [0, 1]": "use_ddp",
    "leave it out: a rank without a heartbeat for 30 s ends the run": "ddp_timeout",
    "leave it out: gradients are summed after the backward pass": "ddp_find_unused_parameters",
    # the shape of a run
    "give the file without a flag: posttrain train FILE": "config",
    _STAGES: "sft_training grpo_training",
    "write --skip sft, on the command line": "skip_sft",
    "write --skip grpo, on the command line": "skip_grpo",
    "it goes inside a stage, as in stages: {dpo: {method: dpo, init_from: sft}}": "init_from",
    "leave it out: posttrain train trains": "do_train",
    f"{_VALIDATION}; evaluation is part of training": "do_eval",
}
_TARGET = re.compile(
    r"write ([a-z_]+(?:\.[a-z_0-9]+)*)(?:: ([\w-]+))?(?:, one of .*|[;,] (?!e\.g\. )(.*))?( \(ppo: [\w.]+\))?"
)
HINTS = {name: text for text, names in _NAMES.items() for name in names.split()}


def hint(name: str) -> str | None:
    """The hint for an unknown name that another system has; otherwise None."""
    if name in HINTS:
        return HINTS[name]
    for section, aliases in ALIASES.items():
        if name in aliases:
            own = PPO_NAMES.get(aliases[name][0]) if section == "method" else None
            path = ".".join([section.removesuffix("s"), *aliases[name]])
            return f"write {path}" + (f" (ppo: method.{own})" if own else "")
    return None


def target(name: str) -> tuple[str, str | None, str] | None:
    """The setting that a name of another system stands for, the word that it takes if the name's value is true (None:
    the value itself), and what the hint adds; None if no hint says that."""
    found = _TARGET.fullmatch(hint(name) or "")
    return (found[1], found[2], found[3] or "") if found else None
