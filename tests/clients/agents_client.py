"""`openai-agents`, whose default is responses: a typed answer and an agent's loop."""

from agents import Agent, AgentOutputSchema, Runner, function_tool, set_tracing_disabled
from asked import ANNA, MODEL, WEATHER, Person, check_answer, weather

TOOL = function_tool(weather, name_override="get_weather", strict_mode=False)


def main() -> None:
    set_tracing_disabled(True)
    typed = Agent(name="typed", model=MODEL, output_type=AgentOutputSchema(Person))
    assert Runner.run_sync(typed, ANNA).final_output == Person(name="Anna", age=31)
    check_answer(Runner.run_sync(Agent(name="weather", model=MODEL, tools=[TOOL]), WEATHER).final_output)


main()
