"""What the hook calls on a draft: validation, a candidate generator, the decoding loop."""

from typing import Any

from transformers.generation.logits_process import LogitsProcessorList

from .candidate_generator import DFlashCandidateGenerator
from .decoding import decode
from .pairing import check_generation, check_pair, warn_of_long_context, warn_of_poor_pair


class DraftProtocol:
    """Mixin of a draft model: the three entry points that `target.generate(assistant_model=draft)` reaches."""

    dflash_protocol = 1

    def validate_generation(self, target: Any, generation_config: Any, mode_kwargs: dict[str, Any]) -> None:
        """Refuse, before any forward, a pairing or a setting that cannot work.

        Raises:
            ValueError: In one sentence, with the field, both values and the way out.
        """
        check_pair(target, self)
        check_generation(target, self, generation_config, mode_kwargs)
        warn_of_poor_pair(target, self, mode_kwargs.get("tokenizer"))

    def get_candidate_generator(
        self, target: Any, generation_config: Any, logits_processor: LogitsProcessorList | None
    ) -> DFlashCandidateGenerator:
        """A candidate generator for Transformers' own assisted loop."""
        return DFlashCandidateGenerator(self, target, generation_config, logits_processor)

    def decode(self, target: Any, input_ids: Any, **kwargs: Any) -> Any:
        """Run our decoding loop on what `generate` has prepared."""
        warn_of_long_context(self, input_ids.shape[1], kwargs["generation_config"])
        return decode(target, self, input_ids, **kwargs)


__all__ = ["DraftProtocol"]
