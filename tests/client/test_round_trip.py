"""Sends answers back as the official clients' own objects dump them: with every member that the library knows."""

import anthropic
import pytest
from openai.types.chat import ParsedChatCompletionMessage
from patience import PATIENCE_S


def said(role, content):
    return {"role": role, "content": content}


def test_a_parsed_message_of_a_chat(served):
    def create(*messages, max_tokens):
        return served.client.chat.completions.create(
            model=served.model, messages=messages, temperature=0, max_tokens=max_tokens
        )

    asked = said("user", served.text)
    message = create(asked, max_tokens=8).choices[0].message
    # As `parse` makes it from an answer.
    parsed = ParsedChatCompletionMessage(**message.model_dump(), parsed={"city": "Bern"})
    whole, plain = (
        create(asked, answer, asked, max_tokens=4)
        for answer in (parsed.model_dump(), said("assistant", message.content))
    )
    assert whole.usage.prompt_tokens == plain.usage.prompt_tokens
    assert whole.choices[0].message.content == plain.choices[0].message.content


def test_items_of_a_response(served):
    def create(*items, max_tokens):
        return served.client.responses.create(
            model=served.model, input=items, temperature=0, max_output_tokens=max_tokens
        )

    asked = said("user", served.text)
    first = create(asked, max_tokens=8)
    items = [item.model_dump() for item in first.output]
    whole = create(asked, *items, asked, max_tokens=4)
    plain = create(asked, said("assistant", first.output_text), asked, max_tokens=4)
    assert whole.usage.input_tokens == plain.usage.input_tokens
    assert whole.output_text == plain.output_text


@pytest.mark.parametrize("keeps", ["message", "content"])
def test_a_message(served, keeps):
    with anthropic.Anthropic(
        base_url=served.server.base_url, api_key="unused", max_retries=0, timeout=PATIENCE_S
    ) as client:

        def create(*messages):
            return client.messages.create(
                model=served.model, max_tokens=8, messages=messages, extra_body={"temperature": 0}
            )

        asked = said("user", served.text)
        first = create(asked)
        dumped = first.model_dump()
        sent_back = dumped if keeps == "message" else said("assistant", dumped["content"])
        whole = create(asked, sent_back, asked)
        plain = create(asked, said("assistant", first.content[0].text), asked)
    assert whole.content[0].text == plain.content[0].text
    usages = (whole.usage, plain.usage)
    assert len({usage.input_tokens + usage.cache_read_input_tokens for usage in usages}) == 1
