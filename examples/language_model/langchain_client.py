#!/usr/bin/env python3
"""A client with LangChain: an answer, a stream and a conversation.

    pip install langchain-openai
    python3 examples/language_model/langchain_client.py --model words

The key is a bearer token of the server; without tokens, any text will do."""

import argparse

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI


def main():
    """Prints the answers."""
    options = argparse.ArgumentParser(description="A client with LangChain")
    options.add_argument("--base-url", default="http://localhost:8000/v1")
    options.add_argument("--model", default="words")
    options.add_argument("--api-key", default="none")
    given = options.parse_args()
    model = ChatOpenAI(
        base_url=given.base_url,
        api_key=given.api_key,
        model=given.model,
        temperature=0,
        max_completion_tokens=64,
        # Without it, the tokens of a stream are not counted.
        stream_usage=True,
        # A proxy with affinity sends the turns of a conversation to the same server.
        default_headers={"x-session-id": "example"},
    )
    chain = ChatPromptTemplate.from_messages([("human", "{greeting} {name}")]) | model
    answer = chain.invoke({"greeting": "hello", "name": "world"})
    print(answer.content.strip(), answer.usage_metadata["output_tokens"])
    whole = None
    for chunk in model.stream("one two"):
        print(chunk.content, end="|", flush=True)
        whole = chunk if whole is None else whole + chunk
    print(whole.usage_metadata["output_tokens"])
    turns = [HumanMessage("hello world"), AIMessage(answer.content), HumanMessage("three four")]
    print(model.invoke(turns).content.strip())


if __name__ == "__main__":
    main()
