"""Conversations, with what is typed piped in."""

import io

import pytest
from scripted import chat_tokenizer, save_scripted

from laplacian_heads import recipes
from laplacian_heads.eval import chat as module
from laplacian_heads.eval.chat import ChatRecipe, chat

CALL = "So <|python_start|>47+85<|python_end|><|output_start|>9<|output_end|>"
SCRIPT = {"Hello": "Good day to you.", "47+85?": CALL, "47+?": "<|python_start|>47+<|python_end|>"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripted")
    save_scripted(folder, SCRIPT)
    return folder


@pytest.fixture
def talk(folder, monkeypatch, capsys):
    """talk(text, **values): what a conversation prints when this text is piped in."""

    def run(text, **values):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        chat(recipes.load(ChatRecipe, "chat", {"model": str(folder), "max_new_tokens": 40, "temperature": 0, **values}))
        return capsys.readouterr().out

    return run


def test_a_conversation(talk):
    assert talk("Hello\n47+85?\nHello\n") == "Good day to you.\nSo [47+85] = 132\n132\nGood day to you.\n"


def test_without_calculator_the_model_invents_the_result(talk):
    assert talk("47+85?\n", calculator=False) == "So [47+85] = 9\n9\n"


def test_what_cannot_be_calculated_is_left_alone(talk):
    assert talk("47+?\n") == "[47+]\n"


@pytest.mark.parametrize("end", ["", "\n", "exit\n", " exit \n"])
def test_the_end(talk, end):
    assert talk(f"Hello\n{end}Hello\n" if end else "Hello") == "Good day to you.\n"


def test_draws_follow_the_seed(tiny, talk, tmp_path):
    tokenizer = chat_tokenizer()
    tiny(vocab_size=len(tokenizer), max_position_embeddings=256, pad_token_id=tokenizer.pad_token_id).save_pretrained(
        tmp_path
    )
    tokenizer.save_pretrained(tmp_path)
    texts = [talk("Hello\nHello\n", model=str(tmp_path), temperature=1.0, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_the_oldest_questions_are_forgotten(talk, monkeypatch):
    seen = []
    original = module._prompt
    monkeypatch.setattr(module, "_prompt", lambda *arguments: seen.append(original(*arguments)) or seen[-1])
    assert talk("Hello\n" * 30, max_new_tokens=100).count("Good day to you.") == 30
    lengths = [inputs["input_ids"].shape[1] for inputs in seen]
    assert lengths[0] < lengths[1] < lengths[2]
    assert 256 - 100 - 2 * lengths[0] < lengths[-1] <= 256 - 100
    assert all(inputs["input_ids"][0, 0] == seen[0]["input_ids"][0, 0] for inputs in seen)


def test_a_question_that_is_too_long(talk):
    assert talk("la " * 300 + "\nHello\n") == (
        "This is too long: a question and its answer have 256 tokens in all.\nGood day to you.\n"
    )


@pytest.mark.parametrize(
    "answer", ["Yes.", CALL + "9", f"{CALL}9 and {CALL}", "<|python_start|>1<|python_end|>then", ""]
)
def test_an_answer_as_messages_is_the_same_tokens(answer):
    """What the model said and what it is shown of it in the next turn agree."""
    tokenizer = chat_tokenizer()
    question = [{"role": "user", "content": "Hello"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    messages = module._messages(answer + "<|assistant_end|>")
    assert tokenizer.apply_chat_template(question + messages, tokenize=False) == prompt + answer + "<|assistant_end|>"


def test_refusals(folder, tiny, tokenizer, tmp_path, talk):
    tiny().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no chat template, which a conversation needs"):
        talk("", model=str(tmp_path))
    with pytest.raises(ValueError, match="max_new_tokens is 256, allowed is less than 256"):
        talk("", max_new_tokens=256)
    for values in ({"temperature": -1.0}, {"top_k": -1}, {"max_new_tokens": 0}, {"seed": -1}, {"model": None}):
        with pytest.raises(ValueError, match=f"{next(iter(values))} is .*, allowed is"):
            talk("", **values)


def test_dry_run(folder, capsys):
    chat(recipes.load(ChatRecipe, "chat", {"model": str(folder)}), dry_run=True)
    assert str(folder) in capsys.readouterr().out
