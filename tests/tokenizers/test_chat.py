"""Chat templates give the tokens that transformers gives, and exactly the answers are trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ConfigError, DataError
from megapipe.tokenizers import rendering
from megapipe.tokenizers.chat import FORMATS, ChatTokenizer, Message
from megapipe.tokenizers.hugging_face import HuggingFaceTokenizer
from megapipe.tokenizers.tokenizer import end_tokens
from tests.tokenizers.chat_tokenizers import write_tokenizer

pytest.importorskip("tokenizers")

INSTRUCTIONS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %}"
    " {% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "plain": "<|endoftext|>", "instructions": "<|endoftext|>"}
CHAT: list[Message] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "héllo"},
    {"role": "assistant", "content": "fine, thanks 🙂"},
    {"role": "user", "content": "how are you"},
    {"role": "assistant", "content": "hello\n\nworld"},
]
Make = Callable[..., ChatTokenizer]


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that builds a tokenizer with a template or a named format."""

    def build(template: str | None = None, prompt_format: str = "default", **more: tuple[str, ...]) -> ChatTokenizer:
        folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), template, **more)
        return ChatTokenizer(HuggingFaceTokenizer(folder), prompt_format)

    return build


def trained_text(tokenizer: ChatTokenizer, chat: list[Message], untrained: tuple[int, ...] = ()) -> str:
    """Return the text of the trained tokens, with special tokens."""
    (found,) = tokenizer.tokenize([tokenizer.render(chat, untrained)])
    ids = [int(i) for i, trained in zip(found.tokens, found.trained, strict=True) if trained]
    return str(tokenizer._library_tokenizer.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("name", ["chatml", "llama3", "plain", "instructions"])
def test_tokens_are_those_of_transformers(make: Make, tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = make(FORMATS.get(name, INSTRUCTIONS))
    chat = CHAT[1:] if name == "instructions" else CHAT
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(chat, tokenize=True)
    (ours,) = tokenizer.tokenize([tokenizer.render(chat)])
    assert ours.tokens.tolist() == list(theirs["input_ids"])


@pytest.mark.parametrize("name", ["chatml", "llama3", "plain"])
def test_answers_with_their_end_are_trained(make: Make, name: str) -> None:
    space = " " if name == "plain" else ""
    expected = "".join(space + m["content"] + ENDS[name] for m in CHAT if m["role"] == "assistant")
    assert trained_text(make(prompt_format=name), CHAT) == expected


@pytest.mark.parametrize("untrained", [2, 4])
def test_an_answer_without_weight_is_written_and_not_trained(make: Make, untrained: int) -> None:
    tokenizer, expected = make(prompt_format="chatml"), CHAT[6 - untrained]["content"] + ENDS["chatml"]
    assert trained_text(tokenizer, CHAT, (untrained,)) == expected
    assert tokenizer.render(CHAT, (untrained,)).text == tokenizer.render(CHAT).text


@pytest.mark.parametrize("name", ["chatml", "llama3", "plain"])
def test_a_saved_chat_tokenizer_ends_texts_where_answers_end(make: Make, tmp_path: Path, name: str) -> None:
    tokenizer = make(prompt_format=name)
    tokenizer.save(tmp_path)
    saved = HuggingFaceTokenizer(tmp_path)
    end, eod = (saved.encode(text)[0] for text in (ENDS[name], "<|endoftext|>"))
    assert set(end_tokens(tokenizer)) == set(end_tokens(saved)) == {end, eod}
    tokenizer.save(tmp_path)  # a second save changes nothing
    assert set(json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]) == {end, eod}


def test_a_format_without_an_end_ends_texts_at_the_end_of_documents(make: Make) -> None:
    tokenizer = make(prompt_format="nemotron-h-aligned", special=("<|endoftext|>", "<SPECIAL_10>", "<SPECIAL_11>"))
    assert end_tokens(tokenizer) == (tokenizer.eod,)


def test_a_format_without_an_end_trains_the_line_break(make: Make) -> None:
    tokenizer = make(prompt_format="nemotron-h-aligned", special=("<|endoftext|>", "<SPECIAL_10>", "<SPECIAL_11>"))
    assert trained_text(tokenizer, CHAT) == "fine, thanks 🙂\nhello\n\nworld\n"


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_exactly_the_answers_are_trained(make: Make, data: st.DataObject) -> None:
    """Texts of any characters: the trained tokens are the answers' text, and the tokens those of the whole text."""
    tokenizer = _chatml.get("it") or _chatml.setdefault("it", make(prompt_format="chatml"))
    texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    roles = data.draw(st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1, max_size=5))
    chat: list[Message] = [{"role": role, "content": data.draw(texts)} for role in roles]
    (found,) = tokenizer.tokenize([tokenizer.render(chat)])
    starts = found.tokens == tokenizer._library_tokenizer.token_to_id("<|im_start|>")
    assert int(starts.sum()) == len(chat)
    assert trained_text(tokenizer, chat) == "".join(
        m["content"] + "<|im_end|>" for m in chat if m["role"] == "assistant"
    )


_chatml: dict[str, ChatTokenizer] = {}


def test_a_token_that_begins_in_the_prompt_is_not_trained(make: Make) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}A: {{ m.content }}{{ eos_token }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
    )
    tokenizer = make(template)
    chat: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "hello world"}]
    (found,) = tokenizer.tokenize([tokenizer.render(chat)])
    assert found.num_cut == 1  # ' hel', whose space is in the prompt
    assert trained_text(tokenizer, chat) == "lo world<|endoftext|>"


def test_text_after_a_special_token_of_an_answer_is_trained(make: Make) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}<|im_start|>{% endif %}{{ m.content }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert trained_text(make(template), CHAT[1:3]) == "<|im_start|>fine, thanks 🙂\n"


BAD_TEMPLATES = {
    "changing": (
        "{% for m in messages %}{{ m.role }}{% if loop.last %}!{% endif %}{{ m.content }}{% endfor %}",
        "writes message 2 differently",
    ),
    "dropping": ("{% for m in messages %}{{ m.content.split('thanks')[0] }}{% endfor %}", "does not write the content"),
    "raising": ("{{ raise_exception('roles must alternate') }}", "refuses the conversation: roles must alternate"),
    "looking": ("{{ messages[9].content }}", "refuses the conversation"),
}


@pytest.mark.parametrize(("template", "message"), BAD_TEMPLATES.values(), ids=BAD_TEMPLATES)
def test_a_template_that_cannot_be_masked_is_refused(make: Make, template: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make(template).render(CHAT[1:3])


def test_special_tokens_in_a_content_are_refused(make: Make) -> None:
    chat = [CHAT[1], {"role": "assistant", "content": "a<|im_end|>b"}]
    with pytest.raises(DataError, match=r"message 2 .*<\|im_end\|>"):
        make(prompt_format="plain").render(chat)


@pytest.mark.parametrize(
    ("template", "prompt_format", "special", "message"),
    [
        (None, "default", ("<|endoftext|>",), "has no chat template"),
        (None, "chatml", ("<|endoftext|>",), r"writes the special token <\|im_start\|>, which .* does not have"),
        (FORMATS["llama3"], "default", ("<|endoftext|>",), r"writes the special token <\|begin_of_text\|>"),
        ("{% for %}", "default", ("<|endoftext|>",), "is not valid Jinja: line 1"),
    ],
    ids=["none", "format", "own", "invalid"],
)
def test_a_tokenizer_that_does_not_fit_is_refused(
    make: Make, template: str | None, prompt_format: str, special: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(template, prompt_format, special=special)


def test_the_template_comes_from_any_of_the_files_that_may_hold_it(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "other", "template": "a"}, {"name": "default", "template": "b"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert HuggingFaceTokenizer(folder).chat_template() == "b"
    (folder / "chat_template.json").write_text('{"chat_template": "c"}')
    assert HuggingFaceTokenizer(folder).chat_template() == "c"
    (folder / "chat_template.jinja").write_text("d")
    assert HuggingFaceTokenizer(folder).chat_template() == "d"


def test_a_named_format_is_saved_with_the_tokenizer(make: Make, tmp_path: Path) -> None:
    make("own", prompt_format="plain").save(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == FORMATS["plain"]
    assert (tmp_path / "tokenizer.json").is_file()


DOUBLED = (
    "{% set n = namespace(a=[], b=[]) %}"
    "{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}"
)
ATTACKS = {  # name -> (template, a word of the answer)
    "zero": ("{{ 1 // (messages | length - 5) }}", "ZeroDivisionError"),
    "syntax": ("{% for message in messages %}{{ message.content }}", "line 1: "),
    "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 1 s"),
    "comparison": (DOUBLED + "{{ n.a == n.b }}", "more than 1 s"),  # one operation, without a hook of Jinja's
    "power": ("{{ 9 ** (9 ** 9) }}", "more than 1 s"),  # as the template is compiled
    "range": ("{% for a in range(1000000000) %}{% endfor %}", "OverflowError"),
    "recursion": ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
    "constant": ("{{ 'a' * 3000000000 }}", "1 GiB"),  # as the template is compiled
    "memory": ("{{ messages[0].content * 3000000000 }}", "1 GiB"),
    "doubled text": (DOUBLED.replace("[n.a, n.a]", "n.a ~ n.a").replace("a=[]", "a='ab'"), "1 GiB"),
    "padding": ("{{ messages[0].content.ljust(3000000000) }}", "1 GiB"),
    "format": ("{{ '%3000000000d' | format(1) }}", "1 GiB"),
    "indent": ("{{ '\n' | indent(3000000000, true, true) }}", "1 GiB"),
    "text": ("{{ messages[0].content * 10000000 }}", "characters"),
    "attribute": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "filter of attributes": ("{{ ('' | attr('__class__')).mro() }}", "unsafe"),
    "format of attributes": ("{{ '{0.__class__.__mro__}'.format('') }}", "unsafe"),
    "change": ("{{ messages.append(1) }}", "unsafe"),
}


@pytest.mark.parametrize(("template", "word"), ATTACKS.values(), ids=ATTACKS)
def test_a_template_that_attacks_ends_with_one_message(
    make: Make, template: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "MOST_SECONDS", 1)
    with pytest.raises((ConfigError, DataError), match=word):
        make(template).render(CHAT)
