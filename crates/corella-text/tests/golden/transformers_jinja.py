"""Jinja2 as Transformers sets it up for chat templates."""

import json
from copy import deepcopy
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.sandbox

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


class GenerationTag(jinja2.ext.Extension):
    """{% generation %} prints its body. Transformers also records where the body begins and ends."""

    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller):
        return caller()


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env


def render(template, conversation):
    """The prompt, or the exception that the template ends with."""
    # The filter `indent` appends a line break to a list that it is given.
    conversation = deepcopy(conversation)
    given = {
        "messages": conversation["messages"],
        "tools": conversation["tools"],
        "documents": None,
        "add_generation_prompt": conversation["add_generation_prompt"],
        **SPECIAL,
        **conversation["kwargs"],
    }
    try:
        return template.render(**given)
    except Exception as error:
        return error
