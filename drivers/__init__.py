"""When and where it is computed: schedules, programs, and what runs them."""
