// Command chaos proves the reservation service under fault. Each round runs a small sale with real processes on a real MySQL,
// lets clients loose on it, kills, stops and cuts off its parts, and then holds every answer against the rows and against a
// model of a correct sale, with a linearizability checker.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/anishathalye/porcupine"
)

const usage = `usage: chaos [--seed N] [--rounds N] [--first N] [--out FILE.md]

Runs rounds of small sales under faults and prints one line each. A round's plan follows from the seed and the round's
number, so --first repeats a round: --seed 7 --first 12 --rounds 1. Needs Go, and what hack/mysql/mysql.sh needs.

exit codes: 0 every round was right, 1 one was not, 2 wrong usage
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	code := command(ctx, os.Args[1:])
	stop()
	os.Exit(code)
}

func command(ctx context.Context, args []string) (exitCode int) {
	flags := flag.NewFlagSet("chaos", flag.ContinueOnError)
	flags.Usage = func() { _, _ = fmt.Fprint(flags.Output(), usage); flags.PrintDefaults() }
	seed := flags.Uint64("seed", 1, "what all rounds are made from")
	rounds := flags.Int("rounds", 20, "how many rounds to run")
	first := flags.Int("first", 0, "number of the first round")
	out := flags.String("out", "", "also write the results to this file, as Markdown")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2
	}
	if flags.NArg() > 0 || *rounds < 1 || *first < 0 {
		fmt.Fprint(os.Stderr, "chaos: --rounds must be positive, --first not negative, and nothing may follow\n", usage)
		return 2
	}
	report, err := runRounds(ctx, *seed, *first, *rounds, "chaos", func(s string) { fmt.Println(s) })
	if report != nil && *out != "" {
		err = errors.Join(err, os.WriteFile(*out, []byte(report.markdown()), 0o644))
	}
	if ctx.Err() != nil {
		err = errors.New("interrupted") // which explains whatever failed then
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "chaos: %v\n", err)
		return 1
	}
	if report.failed() > 0 {
		return 1
	}
	return 0
}

// runRounds runs them one after the other, on a MySQL instance of that name, which is gone afterwards.
func runRounds(ctx context.Context, seed uint64, first, rounds int, instance string, say func(string)) (r *report, err error) {
	root, err := repository()
	if err != nil {
		return nil, err
	}
	h, err := newHarness(ctx, root, instance, say)
	if h != nil {
		defer func() { err = errors.Join(err, h.close()) }()
	}
	if err != nil {
		return nil, err
	}
	r = &report{seed: seed}
	for n := first; n < first+rounds; n++ {
		result := h.run(ctx, makePlan(seed, n))
		if ctx.Err() != nil {
			return r, ctx.Err()
		}
		r.rounds = append(r.rounds, result)
		if _, _, _, undecided := r.sum(); result.verdict == porcupine.Unknown && len(result.failures) == 0 && undecided > 1+rounds/50 {
			result.failures = append(result.failures, "too many histories are undecided: the checker's patience, or the length of the histories, does not fit")
		}
		say(fmt.Sprintf("seed %d round %d: %s", seed, n, result.line()))
		for _, f := range result.failures {
			say("  FAILED " + f)
		}
	}
	say(r.totals())
	return r, nil
}

// repository is the project's folder: this command may be run in any folder below it.
func repository() (string, error) {
	folder, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; ; folder = filepath.Dir(folder) {
		if _, err := os.Stat(filepath.Join(folder, "hack", "mysql", "mysql.sh")); err == nil {
			return folder, nil
		}
		if folder == filepath.Dir(folder) {
			return "", errors.New("run this in a folder of the repository")
		}
	}
}
