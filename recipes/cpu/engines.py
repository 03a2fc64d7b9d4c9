"""FSDP2 engines for actor, reference and critic on CPU: verl's own, without the parts that need an accelerator."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import AutoModelForTokenClassification
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead


class _OnCPU(FSDPEngine):
    """Shards the model without verl's offload policy for reference models, which pins memory."""

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        config = self.engine_config
        self.engine_config = replace(config, forward_only=False, offload_policy=False)
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config = config


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class CPUEngineWithLMHead(_OnCPU, FSDPEngineWithLMHead):
    """Actor and reference."""


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device="cpu")
class CPUEngineWithValueHead(_OnCPU, FSDPEngineWithValueHead):
    """Critic. verl always loads it with flash_attention_2 and ignores the configuration."""

    def _build_module(self) -> torch.nn.Module:
        config = self.model_config.hf_config
        config.num_labels = 1
        config.classifier_dropout = config.hidden_dropout = 0.0
        # The head is not in the checkpoint. It is initialized randomly and must be the same in every run.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.engine_config.seed)
            return AutoModelForTokenClassification.from_pretrained(
                str(self.model_config.local_path),
                config=config,
                dtype=PrecisionType.to_dtype(self.engine_config.model_dtype),
                trust_remote_code=self.model_config.trust_remote_code,
            )
