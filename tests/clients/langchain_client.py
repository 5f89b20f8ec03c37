"""`langchain-openai`: typed answers, forced calls and an agent's loop, by chats and by responses."""

from asked import ANNA, MODEL, WEATHER, Person, check_answer, weather
from langchain_core.messages import HumanMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI

TOOL = StructuredTool.from_function(weather, name="get_weather")


def main() -> None:
    for by_responses in (False, True):
        model = ChatOpenAI(model=MODEL, use_responses_api=by_responses, max_retries=0)
        for method in ("json_schema", "function_calling", "json_mode"):
            if method == "json_mode":
                found = model.with_structured_output(None, method=method).invoke(ANNA)
                assert found == {"name": "Anna", "age": 31}, found
            else:
                found = model.with_structured_output(Person, method=method).invoke(ANNA)
                assert isinstance(found, Person), (method, found)
        called = model.bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False).invoke(WEATHER)
        assert called.tool_calls[0]["name"] == "get_weather", called
        bound, messages = model.bind_tools([TOOL]), [HumanMessage(WEATHER)]
        messages.append(bound.invoke(messages))
        messages += [TOOL.invoke(call) for call in messages[-1].tool_calls]
        check_answer("".join(chunk.text for chunk in bound.stream(messages)))


main()
