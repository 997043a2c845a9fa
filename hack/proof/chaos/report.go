package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/anishathalye/porcupine"
)

// report is what all rounds showed.
type report struct {
	seed   uint64
	rounds []*result
}

func (r *report) failed() int {
	n := 0
	for _, round := range r.rounds {
		if len(round.failures) > 0 {
			n++
		}
	}
	return n
}

type total struct {
	rounds, calls, unknown, failed int
	cut                            int64
}

// sum adds rounds up by fault; a round with two faults counts for both.
func (r *report) sum() (all total, byFault map[string]total, answers map[string]int, undecided int) {
	byFault, answers = map[string]total{}, map[string]int{}
	add := func(t *total, round *result) {
		t.rounds++
		t.calls += round.calls
		t.unknown += round.unknown
		t.cut += round.cut
		t.failed += min(len(round.failures), 1)
	}
	for _, round := range r.rounds {
		add(&all, round)
		for _, f := range round.plan.names() {
			t := byFault[f]
			add(&t, round)
			byFault[f] = t
		}
		for a, n := range round.answers {
			answers[a] += n
		}
		if round.verdict == porcupine.Unknown {
			undecided++
		}
	}
	return all, byFault, answers, undecided
}

func (r *report) totals() string {
	all, byFault, answers, undecided := r.sum()
	var b strings.Builder
	fmt.Fprintf(&b, "%d rounds, %d operations, %d of unknown outcome, %d connections lost at COMMIT, %d histories undecided, %d rounds failed\n",
		all.rounds, all.calls, all.unknown, all.cut, undecided, all.failed)
	b.WriteString("answers:")
	for _, a := range slices.Sorted(maps.Keys(answers)) {
		fmt.Fprintf(&b, " %s %d", a, answers[a])
	}
	b.WriteString("\nrounds by fault:\n")
	for _, f := range slices.Sorted(maps.Keys(byFault)) {
		t := byFault[f]
		fmt.Fprintf(&b, "  %-38s %4d rounds %6d operations %5d of unknown outcome %3d failed\n", f, t.rounds, t.calls, t.unknown, t.failed)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// markdown is the report as a document.
func (r *report) markdown() string {
	all, byFault, answers, undecided := r.sum()
	var b strings.Builder
	fmt.Fprintf(&b, "Seed %d: %d rounds, %d operations, %d of unknown outcome, %d connections lost at COMMIT, %d histories undecided, **%d rounds failed**.\n\n",
		r.seed, all.rounds, all.calls, all.unknown, all.cut, undecided, all.failed)
	b.WriteString("| fault | rounds | operations | of unknown outcome | failed |\n| --- | ---: | ---: | ---: | ---: |\n")
	for _, f := range slices.Sorted(maps.Keys(byFault)) {
		t := byFault[f]
		fmt.Fprintf(&b, "| %s | %d | %d | %d | %d |\n", f, t.rounds, t.calls, t.unknown, t.failed)
	}
	b.WriteString("\nA round with two faults counts for both.\n\n| answer | times |\n| --- | ---: |\n")
	for _, a := range slices.Sorted(maps.Keys(answers)) {
		fmt.Fprintf(&b, "| %s | %d |\n", a, answers[a])
	}
	b.WriteString("\n| round | what was done | operations | of unknown outcome | audit | linearizable | seconds |\n| ---: | --- | ---: | ---: | --- | --- | ---: |\n")
	for _, round := range r.rounds {
		fmt.Fprintf(&b, "| %d | %s | %d | %d | %s | %s | %.1f |\n", round.plan.number, round.plan, round.calls, round.unknown, round.audit,
			strings.ToLower(string(round.verdict)), round.took.Seconds())
	}
	for _, round := range r.rounds {
		for _, f := range round.failures {
			fmt.Fprintf(&b, "\nRound %d FAILED: %s\n", round.plan.number, f)
		}
	}
	return b.String()
}
