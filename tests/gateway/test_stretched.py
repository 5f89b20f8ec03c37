"""A machine that is too slow for the default promise says what holds there."""


def test_a_slow_machine_says_what_holds_instead_of_the_promise(kit, start) -> None:
    running = start(kit.make_config(), step_s=0.4)
    kit.openai_client(running).chat.completions.create(**kit.chat(max_tokens=2))
    running.wait_until(lambda: "too slow for the promised time" in running.log_text.getvalue())
    (line,) = [line for line in running.log_text.getvalue().splitlines() if "too slow" in line]
    assert "model=tiny" in line
    assert "promised_s=0.5" in line
    assert float(line.partition("holds_s=")[2].split()[0]) > 0.5
