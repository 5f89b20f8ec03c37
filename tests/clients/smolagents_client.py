"""`smolagents`: its agent demands calls and reads them; what a tiny model calls is its own business."""

from asked import KEY, MODEL, URL, WEATHER, weather
from smolagents import ActionStep, OpenAIServerModel, ToolCallingAgent, tool


@tool
def get_weather(city: str) -> str:
    """Get the current weather in a city.

    Args:
        city: The name of the city.
    """
    return weather(city)


def main() -> None:
    model = OpenAIServerModel(model_id=MODEL, api_base=URL, api_key=KEY, max_tokens=200)
    agent = ToolCallingAgent(tools=[get_weather], model=model, max_steps=2, verbosity_level=0)
    agent.run(WEATHER)
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
    called = {call.name for step in steps for call in step.tool_calls or ()}
    assert called, steps
    assert called <= {"get_weather", "final_answer"}, called


main()
