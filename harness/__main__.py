"""python -m harness: what run.sh calls."""

try:
    from cli.main import main
except KeyboardInterrupt:  # Ctrl-C at once
    raise SystemExit(130) from None

main()
