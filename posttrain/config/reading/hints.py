"""Names of other systems and their settings here: the table of messages and docs/migrating.md."""

from posttrain.config.reading.layers import ALIASES
from posttrain.config.schema.methods import PPO_NAMES

_LENGTH = "write data.max_length, in tokens of prompt and completion"
_NEW_TOKENS = "write rollout.max_completion_length"
_BATCH = "write training.batch_size: the examples (pairs, prompts) of a step, over all devices"
_MODEL = "write model.path"
_SOURCE = "write data.source, a hub id (owner/name/subset), a file or a folder"
_VALIDATION = "write data.validation, e.g. {ratio: 0.05}, {rows: 500} or {source: ..., split: test}"
_COLUMN = "write data.columns, e.g. {chosen: better}"
_METHOD = "write method.type: sft, reward, dpo, ipo, kto, orpo, cpo, simpo, ppo, grpo, rloo, distill …"
_DTYPE = "write model.dtype: bfloat16"
_LORA = "write model.lora: true, or {r: 16}; leave it out for all weights"
_LOSSES = "write method.loss_type, a list of losses, and method.loss_weights"
_TEMPLATE = "write data.template: chat (the tokenizer's own), a name such as tags or r1_zero, or a .jinja file"
_RESUME = "train with --resume, or --resume FOLDER; the settings come from the checkpoint"
_BEST = "write checkpoint.best_metric, e.g. eval_loss; best/ is kept next to final/"
_REWARDS = "write rewards, e.g. [{type: math}, {type: python, function: 'my_rewards:brevity', weight: 0.1}]"
_REWARD_MODEL = "write rewards: [{type: model, path: FOLDER}], or {type: model, from: STAGE}"
_QUANTISED = "quantise it with posttrain quantize MODEL --to int8 or nf4, and give that folder as its path"
_STAGES = "write stages, e.g. {sft: {method: sft}, grpo: {method: grpo, init_from: sft}}"
_RULES = (
    "each rule is an entry of rewards: match_format_exactly, match_format_approximately, check_answer, check_numbers"
)

# Name there -> hint. Each belongs to a system below, and is not the name of a setting here.
HINTS = {
    # models
    **dict.fromkeys(("model_name_or_path", "model_name", "huggingface_id", "sft_model_path", "base_model"), _MODEL),
    "model_revision": "write model.revision",
    "ref_model_id": "write method.ref_model",
    "moe_aux_loss_coef": "write method.router_aux_loss_coef",
    "attn_implementation": "write model.attention",
    "flash_attn": "write model.attention: flash_attention_2",
    **dict.fromkeys(("bf16", "torch_dtype", "pure_bf16", "infer_dtype"), _DTYPE),
    "fp16": f"{_DTYPE}; float16 is not offered",
    **dict.fromkeys(("use_lora", "use_peft", "peft", "finetuning_type"), _LORA),
    "lora_rank": "write model.lora.r",
    "lora_target": "write model.lora.target_modules: auto, all-linear or a list",
    "lora_modules_to_save": "write model.lora.modules_to_save, or for added tokens model.new_tokens",
    "quantization_bit": "write model.load_in_4bit: true, with model.lora",
    "load_in_8bit": "write model.load_in_4bit: true, with model.lora; 8 bits are not offered for training",
    "adapter_name_or_path": "write model.path: one with the settings of model.lora goes on, others are merged",
    **dict.fromkeys(("fast_inference", "use_vllm"), "write rollout.engine: embedded, which is fast, or vllm"),
    # data
    **dict.fromkeys(("dataset", "dataset_name", "dataset_dir", "data_path", "train_file"), _SOURCE),
    **dict.fromkeys(("dataset_config", "subset"), "append it to the data set's name: data.source: owner/name/subset"),
    "sft_dataset_name": f"{_SOURCE}, in the stage of SFT",
    "grpo_dataset_name": f"{_SOURCE}, in the stage of GRPO",
    **dict.fromkeys(("dataset_train_split", "sft_dataset_split", "grpo_dataset_split"), "write data.split"),
    **dict.fromkeys(
        (
            "eval_dataset",
            "dataset_test_split",
            "val_size",
            "validation_split",
            "train_validation_split",
            "validation_file",
        ),
        _VALIDATION,
    ),
    **dict.fromkeys(("prompt_column", "chosen_column", "rejected_column", "dataset_text_field"), _COLUMN),
    **dict.fromkeys(("max_samples", "subset_size", "num_prompts", "max_train_samples"), "write data.max_rows"),
    **dict.fromkeys(("max_seq_length", "cutoff_len", "model_max_length"), _LENGTH),
    "max_length_percentile": "write data.max_prompt_length: p90",
    **dict.fromkeys(
        ("truncation", "truncation_mode", "truncate_ratio"), "write data.overlong: drop, truncate or error"
    ),
    **dict.fromkeys(
        ("packing", "neat_packing", "padding_free", "packing_strategy", "pad_to_multiple_of"),
        "examples are always packed, without padding; training.tokens_per_pack is the size of a pack",
    ),
    **dict.fromkeys(("mix_strategy", "interleave_probs"), "write data.source: a list of {source: ..., weight: ...}"),
    "train_on_prompt": "write method.completion_only_loss: false",
    "mask_history": "write method.completion_only_loss: true, which trains the last turn only",
    **dict.fromkeys(("chat_template_path", "chat_template", "prompt", "prompt_path"), _TEMPLATE),
    "enable_thinking": "write data.chat_template_kwargs: {enable_thinking: false}",
    "system_prompt_template": "write data.system_prompt",
    **dict.fromkeys(
        ("preprocessing_num_workers", "dataset_num_proc", "overwrite_cache"),
        "leave it out: tokens are cached by the content of data and settings",
    ),
    "streaming": "not offered: rows are read once and cached; data.max_rows limits them",
    "filter_numeric_only": "not offered: rows whose answer a reward cannot read are counted as bad_gold",
    # the optimisation
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size", "rollout_batch_size"), _BATCH),
    "per_device_eval_batch_size": "leave it out: training.tokens_per_pack sets the memory of evaluation too",
    **dict.fromkeys(
        ("gradient_accumulation_steps", "grad_accum", "grad_accum_steps"),
        "leave it out: it follows from training.batch_size and training.tokens_per_pack",
    ),
    **dict.fromkeys(("lr",), "write training.learning_rate"),
    **dict.fromkeys(("epochs", "num_epochs"), "write training.num_train_epochs"),
    **dict.fromkeys(("steps", "n_grpo_steps", "total_episodes"), "write training.max_steps"),
    "warmup_ratio": "write training.warmup_steps; below 1 it is a share of all steps",
    "optim": "write training.optimizer: adamw, adamw_8bit or adamw_cpu_offload",
    "use_gradient_checkpointing": "write training.gradient_checkpointing",
    "activation_offloading": "write training.gradient_checkpointing: true, or training.optimizer: adamw_cpu_offload",
    "random_state": "write seed",
    "disable_dropout": "leave it out: SFT trains with the model's dropout, other methods without",
    "neftune_noise_alpha": "not offered",
    # methods
    **dict.fromkeys(("post_training", "stage"), _METHOD),
    **dict.fromkeys(("dpo_beta", "pref_beta"), "write method.beta"),
    **dict.fromkeys(("pref_loss", "dpo_loss_type"), "write method.loss_type; orpo and simpo are methods: method.type"),
    **dict.fromkeys(("pref_ftx", "rpo_alpha"), f"{_LOSSES}, e.g. [sigmoid, sft] and [1.0, 0.1]"),
    "dpo_label_smoothing": "write method.label_smoothing",
    "teacher_model_name_or_path": "write method.teacher, with method.type: distill",
    "lmbda": "write method.on_policy_fraction",
    "seq_kd": "not offered: write the teacher's completions with `posttrain generate`, and train on them with SFT",
    "kto_chosen_weight": "write method.desirable_weight",
    "kto_rejected_weight": "write method.undesirable_weight",
    "num_mini_batches": "write method.num_minibatches",
    "epochs_per_rollout_batch": "write method.num_iterations (ppo: method.num_ppo_epochs)",
    "steps_per_generation": "write method.num_minibatches; training.batch_size counts the prompts of a step",
    "generation_batch_size": "write training.batch_size (prompts) and method.num_generations (completions of each)",
    "ppo_target": "write method.target_kl",
    "use_std_normalization": "write method.scale_rewards: group, batch or none",
    "advantage_eps": "leave it out: it is fixed",
    "vllm_importance_sampling_cap": "write method.importance_sampling_cap",
    "sync_ref_model": "not offered: a reference is fixed; start another stage with init_from",
    # rewards
    **dict.fromkeys(("reward_funcs", "reward", "reward_weights", "reward_fn"), _REWARDS),
    **dict.fromkeys(("reward_model_path", "reward_model"), _REWARD_MODEL),
    **dict.fromkeys(("rm_quant_type", "ref_quant_type"), _QUANTISED),
    **dict.fromkeys(("use_format_exact", "use_format_approximate", "use_answer_check", "use_number_check"), _RULES),
    **dict.fromkeys(("eos_penalty", "missing_eos_penalty"), "write rewards: [{type: overlong, cache: 64}, ...]"),
    "print_every_steps": "leave it out: every completion is stored; see posttrain rollouts RUN",
    # completions
    **dict.fromkeys(("vllm_sampling", "sampling_params"), "write rollout: temperature, top_p, top_k, ..."),
    **dict.fromkeys(("max_new_tokens", "response_length", "sampling_max_tokens", "max_tokens"), _NEW_TOKENS),
    "sampling_temperature": "write rollout.temperature",
    **dict.fromkeys(
        ("sampling_min_tokens", "include_stop_str_in_output"), "leave it out; rollout.stop ends completions"
    ),
    "vllm_mode": "write rollout.vllm.mode",
    "vllm_gpu_memory_utilization": "write rollout.vllm.gpu_memory_utilization",
    "vllm_server_base_url": "write rollout.vllm.base_url",
    "vllm_server_timeout": "write rollout.vllm.timeout",
    "save_rollouts": "write rollout.save",
    # evaluation, saving, tracking
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), "write evaluation.eval_steps; -1: never"),
    **dict.fromkeys(("eval_num_batches", "max_eval_samples"), "write evaluation.num_batches"),
    **dict.fromkeys(("eval_num_prompts", "num_test_problems"), "write data.validation, e.g. {rows: 128}"),
    "test_problems": "write data.validation: {source: problems.jsonl}",
    "eval_on_start": "write evaluation.at_start",
    "save_strategy": "write checkpoint.save_steps",
    "save_model": "leave it out: final/ is always kept",
    **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model"), _BEST),
    "greater_is_better": "write checkpoint.best_direction: higher or lower; it is known for metrics of posttrain",
    "finetuning": "write checkpoint, e.g. {best_metric: eval_loss, early_stopping_patience: 3}; --resume resumes",
    "early_stopping": "write checkpoint.early_stopping_patience",
    **dict.fromkeys(("resume_from_checkpoint", "resume_from"), _RESUME),
    "overwrite_output_dir": "train with --overwrite",
    **dict.fromkeys(
        ("logging", "log_level", "plot_loss"),
        "write tracking: {report_to: [tensorboard], ...}; curves and a log are always written",
    ),
    **dict.fromkeys(("log_every", "logging_strategy"), "write tracking.logging_steps"),
    "log_dir": "write tracking.logging_dir, with tracking.report_to: [tensorboard]",
    "run_name": "write name",
    "save_path": "write output_dir and name: the model is in {output_dir}/{name}/final",
    **dict.fromkeys(("push_to_hub", "hub_model_id"), "after training: posttrain export RUN --push-to-hub ID"),
    "error_analysis_samples": "leave it out: posttrain score FOLDER FILE gives the reward of any rows",
    # the machine
    **dict.fromkeys(("gpu", "device_ids"), "write devices.ids, e.g. [0]"),
    **dict.fromkeys(
        ("deepspeed", "fsdp"), "write devices.strategy: fsdp, and start it with posttrain launch FILE --nproc N"
    ),
    "use_ddp": "start it with posttrain launch FILE --nproc N, or write devices.ids, e.g. [0, 1]",
    "ddp_timeout": "leave it out: a rank without a heartbeat for 30 s ends the run",
    "ddp_find_unused_parameters": "leave it out: gradients are summed after the backward pass",
    # the shape of a run
    "config": "give the file alone: posttrain train FILE",
    **dict.fromkeys(("sft_training", "grpo_training"), f"{_STAGES}; each with its own training"),
    "skip_sft": "write --skip sft, on the command line",
    "skip_grpo": "write --skip grpo, on the command line",
    "init_from": "it goes inside a stage, as in stages: {dpo: {method: dpo, init_from: sft}}",
    "do_train": "leave it out: posttrain train trains",
    "do_eval": f"{_VALIDATION}; evaluation is part of training",
}

TRL, FACTORY = "TRL and transformers (`trl sft`, `trl dpo`, `trl grpo` …)", "LLaMA-Factory (`llamafactory-cli train`)"
PREFERENCE = "A preference-optimisation pipeline (`src/train.py --config`)"
RLHF = "An RLHF framework on HH-RLHF (`train_reward_model.py`, `train_policy.py`)"
LABORATORY = "A reward-model and GRPO laboratory (`train_rm.py`, `train_grpo.py`)"
PIPELINE = "An SFT-then-GRPO pipeline for maths (`run_training.py`)"
COURSE = "A course's alignment stack (CS336, assignment 5)"

# System -> the names of its keys and flags, in the order of the page; each is in HINTS, an alias or a setting here.
SYSTEMS: dict[str, str] = {
    TRL: """
        model_name_or_path model_revision dtype torch_dtype attn_implementation trust_remote_code use_peft lora_r
        lora_alpha lora_dropout lora_target_modules lora_modules_to_save use_rslora use_dora load_in_4bit
        load_in_8bit use_liger_kernel base_model dataset_name dataset_config dataset_train_split dataset_test_split
        eval_dataset dataset_text_field dataset_num_proc max_train_samples max_eval_samples train_file
        validation_file max_length max_seq_length model_max_length max_prompt_length max_completion_length
        truncation truncation_mode packing packing_strategy padding_free pad_to_multiple_of chat_template_path
        chat_template chat_template_kwargs completion_only_loss assistant_only_loss per_device_train_batch_size
        per_device_eval_batch_size gradient_accumulation_steps gradient_checkpointing learning_rate lr
        lr_scheduler_type warmup_steps warmup_ratio weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
        num_train_epochs epochs num_epochs max_steps total_episodes optim bf16 fp16 seed activation_offloading
        disable_dropout full_determinism neftune_noise_alpha loss_type loss_weights beta label_smoothing rpo_alpha
        reference_free precompute_ref_log_probs sync_ref_model desirable_weight undesirable_weight router_aux_loss_coef
        center_rewards_coefficient teacher_model_name_or_path lmbda seq_kd
        num_generations num_iterations epsilon epsilon_high scale_rewards importance_sampling_level
        mask_truncated_completions generation_batch_size steps_per_generation num_ppo_epochs num_mini_batches
        kl_coef cliprange cliprange_value vf_coef gamma lam missing_eos_penalty response_length reward_funcs
        reward_weights reward_model_path sft_model_path temperature top_p top_k min_p use_vllm vllm_mode
        vllm_gpu_memory_utilization vllm_server_base_url vllm_server_timeout vllm_importance_sampling_cap
        eval_strategy evaluation_strategy eval_steps eval_on_start save_strategy save_steps save_total_limit
        load_best_model_at_end metric_for_best_model greater_is_better early_stopping logging_steps logging_strategy
        report_to run_name output_dir overwrite_output_dir resume_from_checkpoint push_to_hub hub_model_id deepspeed
        fsdp ddp_find_unused_parameters do_eval streaming use_lora peft
    """,
    FACTORY: """
        model_name_or_path adapter_name_or_path stage do_train finetuning_type lora_rank lora_alpha lora_dropout
        lora_target use_rslora use_dora quantization_bit flash_attn infer_dtype pure_bf16 bf16 fp16 dataset
        dataset_dir eval_dataset template enable_thinking cutoff_len max_samples val_size train_on_prompt mask_history
        packing neat_packing mix_strategy interleave_probs streaming overwrite_cache preprocessing_num_workers
        per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps learning_rate
        num_train_epochs max_steps lr_scheduler_type warmup_ratio warmup_steps max_grad_norm optim pref_beta
        pref_loss pref_ftx dpo_label_smoothing simpo_gamma kto_chosen_weight kto_rejected_weight ppo_epochs
        ppo_target ref_model reward_model moe_aux_loss_coef max_new_tokens temperature top_p top_k logging_steps
        save_steps save_total_limit eval_strategy eval_steps plot_loss report_to run_name output_dir
        overwrite_output_dir resume_from_checkpoint deepspeed ddp_timeout
    """,
    PREFERENCE: """
        config huggingface_id trust_remote_code dataset subset split prompt_column chosen_column rejected_column
        max_samples validation_split train_validation_split post_training beta label_smoothing loss_type
        use_ref_model ref_model_id lora r lora_alpha lora_dropout target_modules use_rslora use_dora num_epochs
        per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps learning_rate
        warmup_steps max_seq_length max_prompt_length logging_steps save_steps eval_steps save_total_limit fp16 bf16
        gradient_checkpointing optim weight_decay max_grad_norm gpu device_ids use_ddp finetuning
        resume_from_checkpoint load_best_model_at_end metric_for_best_model greater_is_better
        early_stopping_patience logging report_to logging_dir log_level output_dir
    """,
    RLHF: """
        model_name reward_model_path steps epochs batch_size lr max_length gradient_accumulation_steps max_grad_norm
        eval_steps subset_size num_prompts error_analysis_samples save_model clip_ratio ppo_epochs kl_coef
        entropy_coef group_size dpo_beta dpo_loss_type max_new_tokens temperature log_every seed output_dir
    """,
    LABORATORY: """
        config epochs batch_size lr max_length grad_accum grad_accum_steps max_grad_norm gradient_checkpointing lora
        lora_r lora_alpha lora_dropout lora_target_modules reward_model_path rm_quant_type ref_quant_type group_size
        n_minibatches kl_coef cliprange eos_penalty max_new_tokens temperature eval_steps eval_num_batches
        eval_num_prompts save_steps save_rollouts resume_from log_dir run_name output_dir
    """,
    PIPELINE: """
        config skip_sft skip_grpo model_name max_seq_length lora_rank lora_alpha load_in_4bit fast_inference
        gpu_memory_utilization target_modules use_gradient_checkpointing random_state sft_dataset_name
        sft_dataset_split grpo_dataset_name grpo_dataset_split max_length_percentile truncate_ratio
        filter_numeric_only prompt reasoning_start reasoning_end solution_start solution_end system_prompt_template
        sft_training grpo_training per_device_train_batch_size gradient_accumulation_steps num_generations max_steps
        num_train_epochs learning_rate warmup_ratio optim eval_strategy eval_steps train_validation_split
        vllm_sampling temperature top_p top_k min_p include_stop_str_in_output reward use_format_exact
        use_format_approximate use_answer_check use_number_check print_every_steps num_test_problems max_new_tokens
        test_problems save_path
    """,
    COURSE: """
        n_grpo_steps rollout_batch_size train_batch_size group_size epochs_per_rollout_batch
        gradient_accumulation_steps learning_rate advantage_eps use_std_normalization loss_type cliprange
        sampling_temperature sampling_max_tokens sampling_min_tokens gpu_memory_utilization reward_fn prompt_path
        data_path sampling_params max_tokens
    """,
}


def hint(name: str) -> str | None:
    """The hint for an unknown name, if another system has it; else None."""
    if name in HINTS:
        return HINTS[name]
    for section, aliases in ALIASES.items():
        if name in aliases:
            return f"write {_alias(section, name)}"
    return None


def _alias(section: str, name: str) -> str:
    path = ".".join([section.removesuffix("s"), *ALIASES[section][name]])
    own = PPO_NAMES.get(ALIASES[section][name][0])
    return f"{path} (ppo: method.{own})" if own and section == "method" else path
