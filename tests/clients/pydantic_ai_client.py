"""`pydantic-ai`: typed answers and an agent's loop, by chats and by responses."""

from asked import ANNA, MODEL, WEATHER, Person, check_answer, weather
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel


def main() -> None:
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(MODEL, provider="openai")
        for output in (ToolOutput(Person), NativeOutput(Person), PromptedOutput(Person)):
            found = Agent(model, output_type=output).run_sync(ANNA).output
            assert isinstance(found, Person), (kind, output, found)
        agent = Agent(model)
        agent.tool_plain(name="get_weather")(weather)
        check_answer(agent.run_sync(WEATHER).output)


main()
