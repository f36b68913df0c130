"""The tables of docs/config.md and docs/migrating.md, from the schema and the hints.

python tests/settings_reference.py docs/config.md docs/migrating.md
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel

from posttrain.config.reading.fields import (
    Setting,
    all_settings,
    choices,
    expected,
    full,
    kinds_of,
    known_paths,
    models_in,
)
from posttrain.config.reading.hints import hint
from posttrain.config.render import HEADINGS, flow
from posttrain.config.schema.data import SourceConfig
from posttrain.config.schema.evaluation import EvaluationDataset, SuiteEntry
from posttrain.config.schema.rewards import Reward, RewardTerm
from posttrain.config.schema.rollout import EnvironmentConfig

REWARDS = models_in(Reward)
REWARD_TERM = {"type", *RewardTerm.model_fields}
# System -> the names of its keys and flags, in the order of the page; each is a hint's, an alias or a setting here.
SYSTEMS: dict[str, str] = {
    "TRL and transformers (`trl sft`, `trl dpo`, `trl grpo` …)": """
        model_name_or_path model_revision dtype torch_dtype attn_implementation trust_remote_code use_peft lora_r
        lora_alpha lora_dropout lora_target_modules lora_modules_to_save use_rslora use_dora load_in_4bit load_in_8bit
        use_liger_kernel base_model dataset_name dataset_config dataset_train_split dataset_test_split eval_dataset
        dataset_text_field dataset_num_proc max_train_samples max_eval_samples train_file validation_file max_length
        max_seq_length model_max_length max_prompt_length max_completion_length truncation truncation_mode packing
        packing_strategy padding_free pad_to_multiple_of chat_template_path chat_template chat_template_kwargs
        completion_only_loss assistant_only_loss per_device_train_batch_size per_device_eval_batch_size
        gradient_accumulation_steps gradient_checkpointing learning_rate lr lr_scheduler_type warmup_steps warmup_ratio
        weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm num_train_epochs epochs num_epochs max_steps
        total_episodes optim bf16 fp16 seed activation_offloading disable_dropout full_determinism neftune_noise_alpha
        loss_type loss_weights beta label_smoothing rpo_alpha reference_free precompute_ref_log_probs sync_ref_model
        desirable_weight undesirable_weight router_aux_loss_coef center_rewards_coefficient teacher_model_name_or_path
        lmbda seq_kd num_generations num_iterations epsilon epsilon_high scale_rewards importance_sampling_level
        num_generations_eval max_tool_calling_iterations environment_factory
        mask_truncated_completions generation_batch_size steps_per_generation num_ppo_epochs num_mini_batches kl_coef
        cliprange cliprange_value vf_coef gamma lam missing_eos_penalty response_length reward_funcs reward_weights
        reward_model_path sft_model_path temperature top_p top_k min_p use_vllm vllm_mode vllm_gpu_memory_utilization
        vllm_server_base_url vllm_server_timeout vllm_importance_sampling_cap eval_strategy evaluation_strategy
        eval_steps eval_on_start save_strategy save_steps save_total_limit load_best_model_at_end metric_for_best_model
        greater_is_better early_stopping logging_steps logging_strategy report_to run_name output_dir
        overwrite_output_dir resume_from_checkpoint push_to_hub hub_model_id deepspeed fsdp ddp_find_unused_parameters
        do_eval streaming use_lora peft dataset_streaming shuffle_dataset train_sampling_strategy eval_packing
        bnb_4bit_quant_type use_bnb_nested_quant pad_token eos_token dataloader_num_workers dataloader_pin_memory
        dataloader_prefetch_factor remove_unused_columns lr_scheduler_kwargs gradient_checkpointing_kwargs tf32
        local_rank ds3_gather_for_generation ld_alpha use_weighting
        vllm_importance_sampling_clip_max
        vllm_importance_sampling_correction vllm_importance_sampling_mode ref_model_mixup_alpha ref_model_sync_steps
        reward_model_name_or_path multi_objective_aggregation repetition_penalty log_completions
        num_completions_to_print save_only_model logging_first_step group_by_length init_lora_weights
    """,
    "LLaMA-Factory (`llamafactory-cli train`)": """
        model_name_or_path adapter_name_or_path stage do_train finetuning_type lora_rank lora_alpha lora_dropout
        lora_target use_rslora use_dora quantization_bit flash_attn infer_dtype pure_bf16 bf16 fp16 dataset dataset_dir
        eval_dataset template enable_thinking cutoff_len max_samples val_size train_on_prompt mask_history packing
        neat_packing mix_strategy interleave_probs streaming overwrite_cache preprocessing_num_workers
        per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps learning_rate
        num_train_epochs max_steps lr_scheduler_type warmup_ratio warmup_steps max_grad_norm optim pref_beta pref_loss
        pref_ftx dpo_label_smoothing simpo_gamma kto_chosen_weight kto_rejected_weight ppo_epochs ppo_target ref_model
        reward_model moe_aux_loss_coef max_new_tokens temperature top_p top_k logging_steps save_steps save_total_limit
        eval_strategy eval_steps plot_loss report_to run_name output_dir overwrite_output_dir resume_from_checkpoint
        deepspeed ddp_timeout additional_target disable_shuffling ppo_whiten_rewards ppo_buffer_size pref_bco_weight
        reward_model_type early_stopping_steps dataloader_num_workers save_only_model use_dft_loss use_eaft_loss
        eaft_alpha label_smoothing_factor pissa_init pissa_iter pissa_convert
        loraplus_lr_ratio loraplus_lr_embedding
    """,
    "axolotl (`axolotl train`)": """
        base_model model_type tokenizer_type tokenizer_config is_llama_derived_model special_tokens tokens adapter
        lora_model_dir lora_r lora_alpha lora_dropout lora_target_modules lora_target_linear lora_modules_to_save
        peft_use_dora peft_use_rslora load_in_4bit load_in_8bit val_set_size test_datasets sequence_len
        sample_packing eval_sample_packing pad_to_sequence_len group_by_length train_on_inputs chat_template
        dataset_prepared_path dataset_processes micro_batch_size gradient_accumulation_steps eval_batch_size num_epochs
        max_steps optimizer lr_scheduler cosine_min_lr_ratio learning_rate warmup_steps warmup_ratio weight_decay
        max_grad_norm bf16 fp16 tf32 gradient_checkpointing gradient_checkpointing_kwargs flash_attention sdp_attention
        xformers_attention eager_attention flex_attention loss_watchdog_threshold loss_watchdog_patience rl rl_beta
        orpo_alpha simpo_gamma cpo_alpha kto_desirable_weight kto_undesirable_weight reward_model evals_per_epoch
        saves_per_epoch save_steps eval_steps save_total_limit save_safetensors early_stopping_patience logging_steps
        wandb_project wandb_name output_dir seed resume_from_checkpoint hub_model_id deepspeed fsdp use_eaft eaft_alpha
        eaft_k peft_init_lora_weights loraplus_lr_ratio loraplus_lr_embedding
    """,
    "A preference-optimisation pipeline (`src/train.py --config`)": """
        config huggingface_id trust_remote_code dataset subset split prompt_column chosen_column rejected_column
        max_samples validation_split train_validation_split post_training beta label_smoothing loss_type use_ref_model
        ref_model_id lora r lora_alpha lora_dropout target_modules use_rslora use_dora num_epochs
        per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps learning_rate warmup_steps
        max_seq_length max_prompt_length logging_steps save_steps eval_steps save_total_limit fp16 bf16
        gradient_checkpointing optim weight_decay max_grad_norm gpu device_ids use_ddp finetuning resume_from_checkpoint
        load_best_model_at_end metric_for_best_model greater_is_better early_stopping_patience logging report_to
        logging_dir log_level output_dir
    """,
    "An RLHF framework on HH-RLHF (`train_reward_model.py`, `train_policy.py`)": """
        model_name reward_model_path steps epochs batch_size lr max_length gradient_accumulation_steps max_grad_norm
        eval_steps subset_size num_prompts error_analysis_samples save_model clip_ratio ppo_epochs kl_coef entropy_coef
        group_size dpo_beta dpo_loss_type max_new_tokens temperature log_every seed output_dir
    """,
    "A reward-model and GRPO laboratory (`train_rm.py`, `train_grpo.py`)": """
        config epochs batch_size lr max_length grad_accum grad_accum_steps max_grad_norm gradient_checkpointing lora
        lora_r lora_alpha lora_dropout lora_target_modules reward_model_path rm_quant_type ref_quant_type group_size
        n_minibatches kl_coef cliprange eos_penalty max_new_tokens temperature eval_steps eval_num_batches
        eval_num_prompts save_steps save_rollouts resume_from log_dir run_name output_dir
    """,
    "An SFT-then-GRPO pipeline for maths, with Unsloth (`run_training.py`)": """
        config skip_sft skip_grpo model_name max_seq_length lora_rank lora_alpha load_in_4bit fast_inference
        train_on_responses_only
        gpu_memory_utilization target_modules use_gradient_checkpointing random_state sft_dataset_name sft_dataset_split
        grpo_dataset_name grpo_dataset_split max_length_percentile truncate_ratio filter_numeric_only prompt
        reasoning_start reasoning_end solution_start solution_end system_prompt_template sft_training grpo_training
        per_device_train_batch_size gradient_accumulation_steps num_generations max_steps num_train_epochs learning_rate
        warmup_ratio optim eval_strategy eval_steps train_validation_split vllm_sampling temperature top_p top_k min_p
        include_stop_str_in_output reward use_format_exact use_format_approximate use_answer_check use_number_check
        print_every_steps num_test_problems max_new_tokens test_problems save_path
    """,
    "A course's alignment stack (CS336, assignment 5)": """
        n_grpo_steps rollout_batch_size train_batch_size group_size epochs_per_rollout_batch gradient_accumulation_steps
        learning_rate advantage_eps use_std_normalization loss_type cliprange sampling_temperature sampling_max_tokens
        sampling_min_tokens gpu_memory_utilization reward_fn prompt_path data_path sampling_params max_tokens
    """,
}


def settings_reference() -> str:
    """The settings of the schema as Markdown tables, one for each section."""
    entries = {
        "run": [("`rewards`", _reward_entries()), ("`environments`", _entries(EnvironmentConfig))],
        "data": [("`data.source`, when it is a list", _entries(SourceConfig))],
        "evaluation": [
            ("`evaluation.datasets`", _entries(EvaluationDataset)),
            ("`evaluation.suites`", _entries(SuiteEntry)),
        ],
    }
    parts, settings = [], all_settings()
    for section, heading in HEADINGS.items():
        parts.append(f"### {heading}\n\n{_table(s for s in settings if s.section == section)}")
        parts += [f"Each entry of {setting}:\n\n{table}" for setting, table in entries.get(section, [])]
    return "\n\n".join(parts) + "\n"


def _table(settings: Iterable[Setting]) -> str:
    lines = ["| setting | default | takes | meaning |", "|---|---|---|---|"]
    for setting in settings:
        default = "required" if setting.required else f"`{flow(setting.default)}`"
        takes = " · ".join(choices(setting.annotation)) or expected(setting.annotation)
        only = f" ({', '.join(setting.methods)} only)" if setting.methods else ""
        lines.append(f"| `{setting.path}` | {default} | {_cell(takes)} | {_cell(setting.description)}{only} |")
    return "\n".join(lines)


def _entries(model: type[BaseModel]) -> str:
    return _table(
        Setting(info.alias or name, full(info), info.default, info.is_required(), info.description or "")
        for name, info in model.model_fields.items()
    )


def _reward_entries() -> str:
    """The settings of entries of `rewards`: the common ones, then those of each type."""
    lines = _entries(RewardTerm).splitlines()
    lines.insert(2, f"| `type` | required | {' · '.join(kinds_of(Reward))} | Type of the reward. |")
    for cls in REWARDS:
        kind = ", ".join(kinds_of(cls))
        rows = [row for row in _entries(cls).splitlines()[2:] if row.split("`")[1] not in REWARD_TERM]
        lines += [row.removesuffix(" |") + f" ({kind} only) |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def names_reference() -> str:
    """The names of other systems as Markdown: a table of different names, a line of the same names."""
    return "\n\n".join(f"### {system}\n\n{_names(names.split())}" for system, names in SYSTEMS.items()) + "\n"


def _names(names: Iterable[str]) -> str:
    theirs, same, paths = dict[str, list[str]](), [], known_paths()
    for name in names:
        if message := hint(name):
            theirs.setdefault(message, []).append(f"`{name}`")
        else:
            same.append(" or ".join(f"`{path}`" for path in paths[name]))
    lines = [f"| {', '.join(others)} | {_cell(message)} |" for message, others in theirs.items()]
    lines = ["| there | here |", "|---|---|", *lines]
    return "\n".join(lines) + ("\n\nWith the same name: " + ", ".join(same) + "." if same else "")


def with_reference(document: str) -> str:
    """The document with the parts between marks, `settings` or `names`, replaced by that reference."""
    for mark, reference in (("settings", settings_reference), ("names", names_reference)):
        head, begin, rest = document.partition(f"<!-- {mark}: begin -->\n")
        _, end, tail = rest.partition(f"<!-- {mark}: end -->")
        if begin and end:
            document = f"{head}{begin}\n{reference()}\n{end}{tail}"
    return document


if __name__ == "__main__":
    for name in sys.argv[1:]:
        file = Path(name)
        file.write_text(with_reference(file.read_text(encoding="utf-8")), encoding="utf-8")
