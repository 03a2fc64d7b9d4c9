#!/usr/bin/env bash
# DAPO with Qwen2.5-32B and the settings of the paper (arXiv 2503.14476), on NNODES nodes of 8 GPUs with vLLM.
# Start Ray on the nodes first. A "skip" comment marks the lines that belong to this package.
set -euo pipefail

HOME_DIR=${HOME_DIR:-$HOME/verl}
MODEL_PATH=${MODEL_PATH:-$HOME_DIR/models/Qwen2.5-32B}
TRAIN_FILE=${TRAIN_FILE:-$HOME_DIR/data/dapo-math-17k.parquet}
TEST_FILE=${TEST_FILE:-$HOME_DIR/data/aime-2024.parquet}
CHECKPOINTS=${CHECKPOINTS:-$HOME_DIR/ckpts/DAPO/DAPO-Qwen2.5-32B}
NNODES=${NNODES:-16}
SKIP_MODE=${SKIP_MODE:-cache}                # skip: record | cache | replay | off, see docs/configuration.md
DUMPS=${DUMPS:-$HOME_DIR/rollout_dumps}      # skip: a folder that the driver's node can write to, or s3://…

prompt_length=2048
response_length=20480
tokens=$((prompt_length + response_length))

skip=(                                       # skip
    rollout_skip.mode="$SKIP_MODE"           # skip
    rollout_skip.dump_dir="$DUMPS"           # skip
)
data=(
    data.train_files="$TRAIN_FILE"
    data.val_files="$TEST_FILE"
    data.prompt_key=prompt
    data.truncation=left
    data.max_prompt_length=$prompt_length
    data.max_response_length=$response_length
    data.train_batch_size=512
    data.gen_batch_size=1536
)
dapo=(
    algorithm.filter_groups.enable=True
    algorithm.filter_groups.metric=acc
    algorithm.filter_groups.max_num_gen_batches=10
    reward.reward_kwargs.overlong_buffer_cfg.enable=True
    reward.reward_kwargs.overlong_buffer_cfg.len=4096
    reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0
)
actor=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
    actor_rollout_ref.actor.optim.weight_decay=0.1
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$tokens
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=8
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.grad_clip=1.0
    actor_rollout_ref.actor.fsdp_config.param_offload=True
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
)
rollout=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.top_p=1.0
    actor_rollout_ref.rollout.top_k=-1
    actor_rollout_ref.rollout.tensor_model_parallel_size=4
    actor_rollout_ref.rollout.gpu_memory_utilization=0.80
    actor_rollout_ref.rollout.enable_chunked_prefill=True
    actor_rollout_ref.rollout.max_num_batched_tokens=$tokens
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=$tokens
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7
)
trainer=(
    trainer.use_v1=False
    trainer.project_name=DAPO
    trainer.experiment_name=DAPO-Qwen2.5-32B
    trainer.logger='[console,wandb]'
    trainer.nnodes="$NNODES"
    trainer.n_gpus_per_node=8
    trainer.val_before_train=True
    trainer.test_freq=5
    trainer.save_freq=5
    trainer.total_epochs=1
    trainer.default_local_dir="$CHECKPOINTS"
)

exec python3 -m recipes.dapo.main_dapo \
    "${skip[@]}" "${data[@]}" "${dapo[@]}" "${actor[@]}" "${rollout[@]}" "${trainer[@]}" "$@"
