// Command demo shows a whole sale: "demo run" drives it with kubectl and prints what happens; "demo shop" runs in a pod
// and plays the shoppers and the checkout.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() { os.Exit(command(os.Args[1:])) }

func command(args []string) (exitCode int) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	commands := map[string]func(context.Context, []string) error{"run": run, "shop": shop}
	if len(args) == 0 || commands[args[0]] == nil {
		fmt.Fprintln(os.Stderr, "usage: demo run | shop [flags]; --help lists the flags")
		return 2
	}
	if err := commands[args[0]](ctx, args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "demo: %v\n", err)
		return 1
	}
	return 0
}
