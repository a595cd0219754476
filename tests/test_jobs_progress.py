from jobs.progress import format_duration


def test_durations_read_as_people_say_them():
    cases = {
        0: "0 s",
        0.25: "0.2 s",
        8.04: "8.0 s",
        12: "12 s",
        60: "1 min",
        200: "3 min 20 s",
        7500: "2 h 5 min",
    }
    assert {seconds: format_duration(seconds) for seconds in cases} == cases
