#!/usr/bin/env bash
# GRPO with Qwen3-8B on GSM8K, on one node of 8 GPUs with vLLM, as in verl's examples.
# A "skip" comment marks the lines that belong to this package.
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
DATA=${DATA:-$HOME/data/gsm8k}
NNODES=${NNODES:-1}
SKIP_MODE=${SKIP_MODE:-cache}                # skip: record | cache | replay | off, see docs/configuration.md
DUMPS=${DUMPS:-$HOME/rollout_dumps}          # skip: a folder that the driver's node can write to, or s3://…

skip=(                                       # skip
    rollout_skip.mode="$SKIP_MODE"           # skip
    rollout_skip.dump_dir="$DUMPS"           # skip
)
data=(
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=1024
    data.max_prompt_length=512
    data.max_response_length=1024
    data.filter_overlong_prompts=True
    data.truncation=error
)
actor=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32
    actor_rollout_ref.ref.fsdp_config.param_offload=True
)
rollout=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=5
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32
)
trainer=(
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
    trainer.use_v1=False
    trainer.project_name=verl_grpo_gsm8k
    trainer.experiment_name=qwen3_8b
    trainer.logger='[console,wandb]'
    trainer.nnodes="$NNODES"
    trainer.n_gpus_per_node=8
    trainer.save_freq=20
    trainer.test_freq=5
    trainer.total_epochs=15
)

exec python3 -m recipes.ppo.main_ppo "${skip[@]}" "${data[@]}" "${actor[@]}" "${rollout[@]}" "${trainer[@]}" "$@"
