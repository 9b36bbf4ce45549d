from training.cli.main import main

main()
