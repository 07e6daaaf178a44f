"""What other libraries call our keys; docs/coming_from.md shows the same table."""

from __future__ import annotations

# Our key, perhaps with a remark -> the names that TRL, verl, unsloth and others have for it.
KEYS = {
    "model_dir": "model_name, model_name_or_path, model_id, model_path, base_model, model.path, "
    "pretrained_model_name_or_path",
    "adapter_dir": "adapter_path, lora_path, adapter_name_or_path",
    "output_dir": "output, out_dir, save_dir, trainer.default_local_dir",
    "dataset": "train_dataset, train_data",
    "dataset.source": "data.train_files, train_files, dataset_path, train_file, data_path",
    "dataset.prompt_column": "data.prompt_key, prompt_key",
    "dataset.split": "train_split, dataset_split, dataset_train_split",
    "dataset.system_prompt": "system_message",
    "dataset.max_prompt_tokens (longer prompts are left out, not cut)": "max_prompt_length, "
    "max_prompt_len, data.filter_overlong_prompts, data.truncation",
    "eval_dataset": "test_dataset, val_dataset, validation_dataset",
    "eval_dataset.source": "data.val_files, val_files, eval_file, val_file",
    "rewards": "reward_funcs, reward_func, reward_fn, reward, reward_function, reward_functions, "
    "custom_reward_function.path, custom_reward_function.name",
    "rewards.0.weight": "reward_weights",
    "batch_size (prompts on each rank; each has grpo_samples completions)": "batch, "
    "per_device_train_batch_size, train_batch_size, data.train_batch_size, generation_batch_size, "
    "num_prompts, prompts_per_step",
    "grpo_samples": "num_generations, rollout.n, n, group_size, G, n_samples, "
    "num_return_sequences, samples_per_prompt",
    "max_generated_tokens": "max_completion_length, max_new_tokens, data.max_response_length, "
    "max_response_length, rollout.response_length, max_tokens, max_length",
    "sampling.top_p": "top_p",
    "sampling.top_k": "top_k",
    "sampling.min_p": "min_p",
    "sampling.repetition_penalty": "repetition_penalty",
    "sampling.stop_strings": "stop, stop_words",
    "num_steps": "max_steps, steps, total_steps, num_train_epochs, epochs, num_epochs, "
    "trainer.total_epochs, trainer.total_training_steps, iterations, train_steps, num_iters",
    "ppo_epochs": "num_iterations, mu, actor.ppo_epochs",
    "num_minibatches (how many, not their size)": "steps_per_generation, "
    "actor.ppo_mini_batch_size, ppo_mini_batch_size, mini_batch_size",
    "forward_batch_size (completions in one pass; all passes of a step add up)": "micro_batch, "
    "gradient_accumulation_steps, actor.ppo_micro_batch_size_per_gpu, ppo_micro_batch_size, "
    "ppo_micro_batch_size_per_gpu, actor.ppo_micro_batch_size, micro_batch_size",
    "forward_token_budget": "actor.ppo_max_token_len_per_gpu, ppo_max_token_len_per_gpu, "
    "use_dynamic_bsz",
    "loss.kl_coeff": "beta, kl, kl_coef, kl_loss_coef, actor.kl_loss_coef, actor.use_kl_loss, "
    "use_kl_loss, kl_beta, kl_ctrl.kl_coef, kl_penalty_coef",
    "loss.kl_estimator": "actor.kl_loss_type, kl_loss_type, kl_penalty, use_bias_correction_kl",
    "loss.epsilon_low": "epsilon, clip_ratio, clip_ratio_low, actor.clip_ratio, clip, clip_eps, "
    "actor.clip_ratio_low, cliprange, clip_range",
    "loss.epsilon_high": "clip_ratio_high, actor.clip_ratio_high",
    "loss.dual_clip": "delta, clip_ratio_c",
    "loss.aggregation (grpo, dapo, dr_grpo or prompt)": "loss_type, loss_agg_mode, "
    "actor.loss_agg_mode",
    "loss.surrogate": "policy_loss.loss_mode, loss_mode",
    "loss.entropy_coeff": "entropy_coef, actor.entropy_coeff, entropy_bonus",
    "objective.advantage (group, batch, none, ...)": "scale_rewards, algorithm.adv_estimator, "
    "adv_estimator, norm_adv_by_std_in_grpo, algorithm.norm_adv_by_std_in_grpo",
    "objective.sampling_correction": "vllm_importance_sampling_correction, "
    "vllm_importance_sampling_mode, rollout_correction, rollout_is, tis_imp_ratio_cap",
    "objective.correction_cap": "vllm_importance_sampling_cap, rollout_is_threshold",
    "dynamic_sampling.max_resamples": "filter_groups, algorithm.filter_groups.enable, "
    "max_num_gen_batches",
    "optimizer": "optim",
    "optimizer.lr": "learning_rate, lr, optim.lr, actor.optim.lr",
    "optimizer.weight_decay": "optim.weight_decay",
    "optimizer.betas": "adam_beta1, adam_beta2",
    "optimizer.eps": "adam_epsilon",
    "lr_scheduler": "lr_scheduler_type, scheduler, lr_scheduler_kwargs, warmup_style",
    "lr_scheduler.num_warmup_steps": "warmup_steps, warmup_ratio, warmup, lr_warmup_steps, "
    "optim.lr_warmup_steps, optim.lr_warmup_steps_ratio",
    "clip_grad_norm": "max_grad_norm, grad_clip, actor.grad_clip, gradient_clip",
    "model.lora_rank": "r, lora_r, rank, peft_config, use_peft",
    "model.lora_alpha": "alpha",
    "model.lora_attn_modules (and model.apply_lora_to_mlp)": "target_modules, lora_target_modules",
    "model.quantize_base (with a LoRA config)": "load_in_4bit, quantization_config",
    "tokenizer.max_seq_len": "max_seq_length, max_model_len, vllm_max_model_len",
    "tokenizer.chat_template_kwargs": "chat_template, apply_chat_template_kwargs",
    "device": "use_cpu, no_cuda, accelerator",
    "dtype (bf16 or fp32)": "bf16, fp16, torch_dtype, precision, mixed_precision",
    "compile": "torch_compile, use_torch_compile",
    "enable_activation_checkpointing": "gradient_checkpointing, enable_gradient_checkpointing, "
    "use_gradient_checkpointing, activation_checkpointing",
    "distributed.sharding": "fsdp, deepspeed, fsdp_config, strategy, actor.strategy",
    "distributed.cpu_offload": "fsdp_config.param_offload, fsdp_config.optimizer_offload",
    "seed": "random_state, data_seed, random_seed",
    "evaluation.every_n_steps": "eval_steps, eval_strategy, trainer.test_freq, eval_every, "
    "evaluation_strategy",
    "evaluation.samples": "num_generations_eval, val_kwargs.n",
    "evaluation.keep_best": "load_best_model_at_end, metric_for_best_model",
    "saving.every_n_steps": "save_steps, save_strategy, trainer.save_freq, save_every, "
    "checkpoint_every",
    "saving.keep_last": "save_total_limit, trainer.max_actor_ckpt_to_keep",
    "saving.adapter_weights_only": "save_only_model, save_method, save_adapter_weights_only",
    "resume_from_checkpoint": "resume, trainer.resume_mode",
    "metric_logger": "report_to, logger, trainer.logger, use_wandb, wandb, logging_dir",
    "log_groups": "log_completions, num_completions_to_print",
}
# Why there is no key -> the names.
NO_KEY = {
    "every step is logged": "logging_steps, logging_strategy, logging_first_step, log_every",
    "output_dir names a run": "run_name, trainer.experiment_name, trainer.project_name",
    "responses are generated here, without vLLM": "use_vllm, vllm_mode, rollout.name, "
    "vllm_gpu_memory_utilization, vllm_server_host, vllm_server_port, vllm_enable_sleep_mode, "
    "vllm_tensor_parallel_size, fast_inference, gpu_memory_utilization, "
    "rollout.gpu_memory_utilization, rollout.tensor_model_parallel_size",
    "the builders have no dropout but model.lora_dropout": "disable_dropout",
    "the reference is the initial policy throughout": "sync_ref_model, ref_model_sync_steps, "
    "ref_model_mixup_alpha, ref_model, reference_model",
    "every column goes to the rewards": "remove_unused_columns",
    "the process itself reads the rows": "dataloader_num_workers, "
    "dataloader_drop_last, dataloader_pin_memory",
    "sampler decides the order of prompts": "shuffle_dataset, data.shuffle",
    "the builder reads it from model_dir": "model_init_kwargs, attn_implementation, "
    "tokenizer_path, processing_class, trust_remote_code",
    "the config hf_full_grpo trains all weights": "full_finetuning",
    "there is one config; write its keys one by one": "args, training_args, trainer_args",
    "`tune run --nproc_per_node` says how many GPUs there are": "trainer.n_gpus_per_node, n_gpus, "
    "num_gpus, trainer.nnodes, num_processes, world_size",
    "GRPO has no critic": "critic, critic_warmup, trainer.critic_warmup, value_model, vf_coef, "
    "algorithm.gamma, algorithm.lam, gamma, lam",
    "nothing is sent to the hub": "push_to_hub, hub_model_id, hub_token",
}


def meaning(name: str, *, ends: bool = False) -> str | None:
    """Say what a name of another library is here; ``ends``: its last parts may be that name."""
    parts = name.split(".")
    for start in range(len(parts) if ends else 1):
        if text := _MEANINGS.get(".".join(parts[start:])):
            return text
    return None


_MEANINGS = {
    name: text.format(ours)
    for table, text in ((KEYS, "Did you mean {}?"), (NO_KEY, "There is no key for it: {}."))
    for ours, names in table.items()
    for name in names.split(", ")
}


def markdown_table() -> str:
    """The table as docs/coming_from.md has it."""
    rows = ["| Their name | Here |", "|---|---|"]
    for table, text in ((KEYS, "`{}`{}"), (NO_KEY, "no key: {}{}")):
        for ours, names in table.items():
            key, _, remark = ours.partition(" (") if table is KEYS else (ours, "", "")
            theirs = ", ".join(f"`{name}`" for name in names.split(", "))
            rows.append(f"| {theirs} | {text.format(key, remark and f' ({remark}')} |")
    return "\n".join(rows)
