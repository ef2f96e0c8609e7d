"""Sends requests to a server by LlamaIndex, whose pins conflict with the other tests', and prints the results as JSON.

    python ask.py URL MODEL DICTATED_URL DICTATED_MODEL TEXT MAX_TOKENS
"""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

url, model, dictated_url, dictated_model, text, max_tokens = sys.argv[1:]


def client(url, model, **options):
    return OpenAILike(
        api_base=f"{url}/v1", api_key="unused", model=model, is_chat_model=True, context_window=4096, max_retries=0, **options
    )


def get_weather(city: str) -> str:
    """The weather of a city"""
    return "sunny"


asked = client(url, model, temperature=0, max_tokens=int(max_tokens))
messages = [ChatMessage(role="user", content=text)]
# The seed chooses the dictating server's answer.
dictated = client(dictated_url, dictated_model, is_function_calling_model=True, additional_kwargs={"seed": 0})
tool = FunctionTool.from_defaults(get_weather)
called = dictated.chat_with_tools([tool], user_msg="What is the weather?")
calls = dictated.get_tool_calls_from_response(called)
print(
    json.dumps(
        {
            "chat": asked.chat(messages).message.content,
            "stream": "".join(part.delta or "" for part in asked.stream_chat(messages)),
            "calls": [[call.tool_name, call.tool_kwargs] for call in calls],
            "call_text": called.message.content,
        }
    )
)
