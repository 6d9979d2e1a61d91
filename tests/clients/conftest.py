"""LangChain's chat model as the tests of this folder make it."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from langchain_openai import ChatOpenAI


@pytest.fixture
async def chat_model(base_url: str) -> AsyncIterator[Callable[..., ChatOpenAI]]:
    """Make chat models of the server at base_url. LangChain's own HTTP clients would be closed by no one."""
    with httpx.Client() as http:
        async with httpx.AsyncClient() as async_http:

            def make(**settings: Any) -> ChatOpenAI:
                return ChatOpenAI(
                    base_url=base_url,
                    api_key="none",
                    model="stub",
                    max_retries=0,
                    http_client=http,
                    http_async_client=async_http,
                    **settings,
                )

            yield make
