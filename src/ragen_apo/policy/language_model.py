"""A causal language model of transformers with its tokenizer, and the small default model.

Consumes a folder written by `save_pretrained` (or a hub name) and produces hidden states and token
logits. The model body and the vocabulary projection are called separately, so that logits are
computed only where they are needed: at the last position while generating, at sampled tokens while
training.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ragen_apo.config.policy import ADAPTER_SETTINGS, SmallModelConfig
from ragen_apo.distributed.sharding import Shards
from ragen_apo.errors import ModelError
from ragen_apo.policy.architecture import check_architecture
from ragen_apo.policy.attention import ATTENTION, whole_rows
from ragen_apo.policy.chat_template import (
    TEMPLATE_DATE,
    ChatTemplate,
    asks_for_the_date,
    read_chat_template,
)
from ragen_apo.policy.hub import hub_commit, not_loaded, refuse_code_from_elsewhere
from ragen_apo.policy.lora import adapters_disabled, has_adapters, plain_weights, update_digest
from ragen_apo.policy.model_checks import check_embeddings, probe_model, refuse_foreign_weights
from ragen_apo.policy.packed_weights import packed_weights
from ragen_apo.policy.passes import (
    at_least_float32,
    body_output,
    decoder_layers,
    in_pieces,
    indices_of,
    read_nothing,
)
from ragen_apo.policy.template_options import set_template_options
from ragen_apo.policy.tokenizer import CLOSE_ANSWER, printed_tokens, tokenizer_contents
from ragen_apo.seeding import derive_seed

ROPE_THETA = 10_000.0
MAX_LOGITS = 2**26
"""Numbers in the largest tensor [n, V] of a pass over targets: 256 MiB in float32."""
PREVIOUS_TOKEN_SHARPNESS = 5.7
"""Size of a head's constant queries and keys; the next best position is about 4 nats behind."""
_HOUSEKEEPING = ("_name_or_path", "architectures", "dtype", "transformers_version")
"""Keys of a model's configuration that saving changes and computation does not use."""


@dataclass
class LanguageModel:
    """A causal LM and its tokenizer on one device."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    autocast: torch.dtype | None = None
    """Format of the body's matrix products; None for that of the weights."""
    gradient_checkpointing: bool = False
    """Whether layers are computed again for the backward pass: slower, with less memory."""
    adapters: bool = True
    """Whether adapters act, if the model has any (see `policy.lora`)."""
    commit: str | None = None
    """The commit of the Hugging Face hub that it was loaded from; None for a folder."""
    shards: Shards | None = None
    """Where the weights are spread over several ranks; `model` has this one's share then."""
    is_constant: bool = False
    """Whether its weights stay what they are, as those of a reference do: they are hashed once."""
    template: ChatTemplate = field(init=False)
    """What the tokenizer's chat template does."""
    _fingerprint: str | None = field(default=None, init=False)
    """That of a constant model, once it was asked for."""

    def __post_init__(self) -> None:
        if self.gradient_checkpointing and not decoder_layers(self.model):
            raise ModelError(
                f"machine.gradient_checkpointing: {type(self.model).__name__} has no layers that "
                "transformers can compute again; set it to false"
            )
        self.template = read_chat_template(self.tokenizer)
        self.model.set_attn_implementation(ATTENTION)
        with self._mode(), torch.inference_mode():
            probe_model(self.model)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def compute_dtype(self) -> torch.dtype:
        """Format of the body's matrix products."""
        return self.autocast or self.model.dtype

    @property
    def pad_id(self) -> int:
        """The token that pads rows on the right; no result depends on it."""
        token_id = self.tokenizer.pad_token_id
        if isinstance(token_id, int) and 0 <= token_id < self.vocabulary_size:
            return token_id
        return 0

    @property
    def vocabulary_size(self) -> int:
        """Tokens that the model can read and write; its table may have more than the tokenizer."""
        embeddings = self.model.get_input_embeddings()
        assert isinstance(embeddings, nn.Embedding)
        return embeddings.num_embeddings

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end a response, in ascending order.

        They are named by the model (generation_config.json), the tokenizer and the chat template.
        """
        generation = self.model.generation_config
        configured = generation.eos_token_id if generation else None
        found = configured if isinstance(configured, list) else [configured]
        named = {token for token in found if token is not None}
        return tuple(sorted(named | self.template.end_ids))

    def hidden_states(self, token_ids_RT: Tensor, **kwargs: Any) -> Tensor:
        """The body's output [R, T, H]; without a mask, attention is causal over the whole row.

        Rows padded on the right need no mask: a token never sees what comes after it. Weights in
        shares have to be `whole`; `over_targets` needs no such thing.
        """
        with self._mode():
            return body_output(
                self.model.base_model,
                token_ids_RT,
                autocast=self.autocast,
                gradient_checkpointing=self.gradient_checkpointing,
                **kwargs,
            )

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Vocabulary logits [N, V], in float32 or more, of selected hidden states [N, H]."""
        projection = self.model.get_output_embeddings()
        assert projection is not None
        with torch.autocast(self.device.type, enabled=False):
            return at_least_float32(projection(hidden_NH.to(projection.weight.dtype)))

    def over_targets(
        self,
        token_ids_RT: Tensor,
        targets_RT: Tensor,
        read: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
        read_all: Callable[[Tensor], tuple[Tensor, ...]] = read_nothing,
    ) -> tuple[Tensor, ...]:
        """Tensors [N, ...] that `read` makes of the N targets, in little memory.

        After them come those that `read_all` makes of all hidden states [R, T, H] of the same pass.

        `read` gets the hidden states [n, H] that predict n of them, and their tokens [n]. They are
        so few that their `logits` are at most `MAX_LOGITS` numbers; for the backward pass `read` is
        called again, unless it had all of them at once. Of each target it may use its own row only.
        Rows of tokens are padded on the right. Where the mask is on the CPU, the host does not wait
        for a GPU to count the targets. ValueError if the first token of a row is a target.
        """
        predicts_RT = torch.zeros_like(targets_RT)
        predicts_RT[:, :-1] = targets_RT[:, 1:]
        # By numbers: a mask would be counted again in the backward pass.
        before_N, at_N = (
            indices_of(mask, token_ids_RT.device) for mask in (predicts_RT, targets_RT)
        )
        if len(before_N) != len(at_N):
            raise ValueError("the first token of a row cannot be a target: nothing predicts it")
        tokens_N = token_ids_RT.flatten()[at_N]

        def compute() -> tuple[Tensor, ...]:
            rows = whole_rows(token_ids_RT.device)
            hidden_RTH = self.hidden_states(token_ids_RT, use_cache=False, **rows)
            hidden_NH = hidden_RTH.flatten(0, 1)[before_N]
            max_rows = max(MAX_LOGITS // self.vocabulary_size, 1)
            found = in_pieces(read, hidden_NH, tokens_N, max_rows=max_rows)
            return (*found, *read_all(hidden_RTH))

        return compute() if self.shards is None else self.shards.run(compute)

    def shard(self, *, num_ranks: int) -> None:
        """Leaves this rank its share of the weights, from now on; see `distributed.sharding`."""
        assert self.shards is None
        self.shards = Shards(self.model, decoder_layers(self.model)[::-1], num_ranks=num_ranks)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, `model` has all weights, also where they are in shares: to play, hash or save.

        All ranks have to come. What is trained does not change inside, and no pass is an exchange.
        """
        if self.shards is None:
            yield
            return
        in_shares, shards = self.model, self.shards
        with shards.whole() as model:
            self.model, self.shards = cast(PreTrainedModel, model), None
            try:
                yield
            finally:
                self.model, self.shards = in_shares, shards

    @contextlib.contextmanager
    def constant_weights(self) -> Iterator[None]:
        """Inside, no weight may change and nothing is trained: each is converted and packed once.

        Autocast only caches weights that require a gradient, so inside all of them do. Weights in
        shares are whole.
        """
        with self.whole(), self._cached_by_autocast(), packed_weights(self.model):
            yield

    @contextlib.contextmanager
    def _cached_by_autocast(self) -> Iterator[None]:
        if self.autocast is None:
            yield
            return
        frozen = [weight for weight in self.model.parameters() if not weight.requires_grad]
        try:
            for weight in frozen:
                weight.requires_grad_(weight.is_floating_point())
            with torch.autocast(self.device.type, dtype=self.autocast):
                yield
        finally:
            for weight in frozen:
                weight.requires_grad_(False)

    def freeze_embeddings(self) -> None:
        """Keeps the token embeddings, and with tied weights the projection, as they are."""
        self.model.get_input_embeddings().requires_grad_(False)

    def fingerprint(self) -> str:
        """The identity of a reference: a hash of all that its output depends on.

        These are the weights, the architecture's numbers (a rotary base is not a weight), the
        tokenizer, the chat template with the date and the special tokens that it gets, and the end
        tokens.
        """
        if self._fingerprint is not None:
            return self._fingerprint
        architecture = self.config.to_diff_dict()
        rest = {
            "architecture": {k: v for k, v in architecture.items() if k not in _HOUSEKEEPING},
            "tokenizer": tokenizer_contents(self.tokenizer),
            "chat_template": str(self.tokenizer.chat_template),
            "end_ids": self.end_ids,
        }
        if self.autocast is not None:
            rest["autocast"] = str(self.autocast)
        if asks_for_the_date(self.tokenizer):
            rest["template_date"] = str(TEMPLATE_DATE)
        if printed := printed_tokens(self.tokenizer, self.config):
            rest["printed_tokens"] = printed
        digest = hashlib.sha256(json.dumps(rest, sort_keys=True, default=str).encode())
        with self.whole():
            update_digest(digest, plain_weights(self.model, adapters=self.adapters))
        found = digest.hexdigest()[:16]
        self._fingerprint = found if self.is_constant else None
        return found

    def save(self, directory: Path) -> None:
        """Writes safetensors, configuration and tokenizer in the form that transformers loads.

        Adapters are added to the weights, so the folder holds a model like any other.
        """
        with self.whole():
            weights = plain_weights(self.model, adapters=self.adapters)
            self.model.save_pretrained(directory, state_dict=weights)
        self.tokenizer.save_pretrained(directory)

    def copy_with(self, tensors: Mapping[str, Tensor]) -> LanguageModel:
        """A model for evaluation with these tensors in the place of its own of the same names.

        They are not copied, nor are the model's own that are not named, so what changes there
        changes here. All else is, so that another thread may use the copy: layers, whose adapters
        can be switched off, and the tokenizer. The weights may not be in shares.
        """
        assert self.shards is None
        own = self.model.state_dict(keep_vars=True)
        memo: dict[int, object] = {id(tensor): tensor for tensor in own.values()}
        for name, tensor in tensors.items():
            is_weight = isinstance(own[name], nn.Parameter)
            memo[id(own[name])] = nn.Parameter(tensor, requires_grad=False) if is_weight else tensor
        made = copy.deepcopy(self, memo)
        made.is_constant, made._fingerprint = False, None
        made.model.eval()
        return made

    def without_adapters(self) -> LanguageModel:
        """The model that adapters were added to; shares all weights with this one."""
        bare = copy.copy(self)
        bare.adapters, bare.is_constant, bare._fingerprint = False, False, None
        return bare

    def _mode(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.adapters else adapters_disabled(self.model)


def load_language_model(
    path: str | Path,
    *,
    device: torch.device,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    max_context_tokens: int | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> LanguageModel:
    """Loads a local folder or a hub name. Only safetensors weights are read.

    All parts of a model of the hub are of one commit: that of `revision`, or the newest. Raises
    ModelError with the missing part: configuration, weights, tokenizer or chat template; what
    `check_architecture` raises for contexts of `max_context_tokens`, None for any length; and what
    `set_template_options` does.
    """
    commit = hub_commit(path, revision=revision)
    config = _read_config(
        path, revision=revision, commit=commit, trust_remote_code=trust_remote_code
    )
    check_architecture(config, path, max_context_tokens=max_context_tokens)
    try:
        # With `output_loading_info` it returns a pair, which its types do not say.
        found: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            revision=commit,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            attn_implementation="sdpa",  # refuses models that cannot; LanguageModel sets its own
            ignore_mismatched_sizes=True,  # `refuse_foreign_weights` names them
            output_loading_info=True,
        )
        model, loading = found
    except Exception as error:
        # A broken folder raises other types than OSError and ValueError as well.
        if "safetensor" in f"{type(error).__module__} {type(error).__name__}".lower():
            raise ModelError(
                f"the weights in '{path}' are not a whole safetensors file: {error}. "
                "The file was cut off or overwritten; copy or train it again."
            ) from error
        raise not_loaded(path, error, revision=revision) from error
    if has_adapters(model):
        raise _adapters_of_others(path)
    refuse_foreign_weights(path, model, loading)
    tokenizer = load_tokenizer(
        path,
        revision=commit,
        trust_remote_code=trust_remote_code,
        template_options=template_options,
    )
    nn.Module.to(model, device)
    loaded = LanguageModel(
        model.eval(),
        tokenizer,
        autocast,
        gradient_checkpointing=gradient_checkpointing,
        commit=commit,
    )
    num_tokens = loaded.vocabulary_size
    check_embeddings(path, loaded.template, end_ids=loaded.end_ids, num_tokens=num_tokens)
    return loaded


def check_model(
    path: str | Path,
    *,
    max_context_tokens: int,
    trust_remote_code: bool,
    revision: str | None = None,
) -> None:
    """Checks a model before its weights are loaded; a hub name is looked up at the hub.

    Raises ModelError for a model that is not there or has no tokenizer, and what `hub_commit`,
    `refuse_code_from_elsewhere` (for a revision) and `check_architecture` raise.
    """
    _check_folder(path)
    commit = hub_commit(path, revision=revision)
    if trust_remote_code and revision is not None:
        refuse_code_from_elsewhere(path, revision=revision)
    config = _read_config(
        path, revision=revision, commit=commit, trust_remote_code=trust_remote_code
    )
    check_architecture(config, path, max_context_tokens=max_context_tokens)


def _read_config(
    path: str | Path, *, revision: str | None, commit: str | None, trust_remote_code: bool
) -> Any:
    try:
        return AutoConfig.from_pretrained(
            path, revision=commit, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        # A faulty config.json raises many types of exception.
        raise not_loaded(path, error, revision=revision) from error


def _adapters_of_others(path: str | Path) -> ModelError:
    """The library would put them in by itself, and freeze the weights."""
    return ModelError(
        f"'{path}' holds adapters ({ADAPTER_SETTINGS}); expected a model alone. Merge them with "
        "peft (merge_and_unload, then save_pretrained into a new folder), or remove the files "
        "adapter_* to take the model without them"
    )


def _check_folder(path: str | Path) -> None:
    if (Path(path) / ADAPTER_SETTINGS).is_file():
        raise _adapters_of_others(path)
    if Path(path).is_dir() and not any(Path(path).glob("tokenizer*")):
        raise ModelError(
            f"'{path}' holds a model but no tokenizer (tokenizer.json, tokenizer_config.json); "
            "save the tokenizer into the same folder with tokenizer.save_pretrained."
        )


def load_tokenizer(
    path: str | Path,
    *,
    trust_remote_code: bool,
    revision: str | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name; ModelError if there is none that can be read.

    `template_options` are written into its chat template; see `set_template_options`.
    """
    _check_folder(path)
    commit = hub_commit(path, revision=revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=commit, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        # A tokenizer.json of another program fails in its own way.
        raise ModelError(
            f"no tokenizer could be loaded from '{path}' ({type(error).__name__}: {error}); copy "
            "the model's tokenizer files again"
        ) from error
    set_template_options(tokenizer, template_options or {})
    return tokenizer


def build_small_model(
    tokenizer: PreTrainedTokenizerBase, sizes: SmallModelConfig, *, seed: int
) -> LanguageModel:
    """A randomly initialised Llama decoder with tied embeddings for this tokenizer.

    The weights are a function of the seed alone. Attention heads of the first layer start out
    looking at the previous tokens (see `_look_at_previous_tokens`). Responses end with the closing
    tag, one token of the project's own tokenizer, stored as the end token of generation.
    """
    closing_tag_id = tokenizer.convert_tokens_to_ids(CLOSE_ANSWER)
    pad_id = tokenizer.pad_token_id
    assert isinstance(pad_id, int)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=sizes.hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_heads,
        intermediate_size=sizes.intermediate_size,
        max_position_embeddings=sizes.max_position,
        tie_word_embeddings=True,
        attention_bias=True,
        bos_token_id=None,
        eos_token_id=closing_tag_id,
        pad_token_id=pad_id,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "model-weights"))
        model = LlamaForCausalLM(config)
    _look_at_previous_tokens(model)
    model.generation_config = GenerationConfig(
        eos_token_id=closing_tag_id, pad_token_id=pad_id, do_sample=False
    )
    return LanguageModel(model.eval(), tokenizer)


@torch.no_grad()
def _look_at_previous_tokens(model: LlamaForCausalLM) -> None:
    """Sets queries and keys of heads of the first layer to constants that point 1, 2, ... back.

    Copying needs two heads in sequence (an induction circuit): one attends to the previous token,
    the other to tokens whose predecessor is the present one. Neither is of use alone, so random
    weights learn them slowly (docs/log.md). There are several offsets, because it often takes
    several words to know what to copy, as the whole title before an id. One head stays random.
    With constant q and k the score of a pair at offset o is
    sum_f c^2 cos(theta_f (i - j - o)) / sqrt(head_dim), largest at j = i - o.
    """
    attention: Any = model.model.layers[0].self_attn
    head_dim = attention.head_dim
    frequencies = ROPE_THETA ** (-torch.arange(0, head_dim, 2) / head_dim)
    still = torch.cat([torch.ones(head_dim // 2), torch.zeros(head_dim // 2)])
    for index in range(max(model.config.num_attention_heads - 1, 1)):
        angles = frequencies * (index + 1)
        back = torch.cat([torch.cos(angles), -torch.sin(angles)])
        head = slice(index * head_dim, (index + 1) * head_dim)
        attention.q_proj.weight[head] = 0.0
        attention.k_proj.weight[head] = 0.0
        attention.k_proj.bias[head] = PREVIOUS_TOKEN_SHARPNESS * still
        attention.q_proj.bias[head] = PREVIOUS_TOKEN_SHARPNESS * back


transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
