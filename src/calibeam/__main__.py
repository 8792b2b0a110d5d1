from calibeam.cli import main

main()
