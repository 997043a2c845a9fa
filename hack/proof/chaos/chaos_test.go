package main

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"syscall"
	"testing"

	"github.com/anishathalye/porcupine"
)

func number(t *testing.T, name string, otherwise int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s must be a number: %v", name, err)
	}
	return n
}

// TestRounds runs ROUNDS rounds (20) of SEED (1). Then it makes sure that the whole of it can fail: a real history in which one
// grant is told twice is found out.
func TestRounds(t *testing.T) {
	ctx, stop := signal.NotifyContext(t.Context(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	report, err := runRounds(ctx, uint64(number(t, "SEED", 1)), 0, number(t, "ROUNDS", 20), "chaos-test", func(s string) { t.Log(s) })
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range report.rounds {
		for _, f := range r.failures {
			t.Errorf("seed %d round %d: %s", r.plan.seed, r.plan.number, f)
		}
	}
	for _, r := range report.rounds {
		h := *r.history
		grant := slices.IndexFunc(h.calls, func(c call) bool { return c.Answer == "granted" })
		if grant < 0 || len(r.failures) > 0 {
			continue
		}
		twice := h.calls[grant]
		twice.Client = r.plan.clients + 1
		h.calls = append(slices.Clone(h.calls), twice)
		if got, err := h.check(checkPatience); err != nil || got.CheckResult != porcupine.Illegal {
			t.Errorf("round %d with a grant told twice: got %s, %v; want Illegal", r.plan.number, got.CheckResult, err)
		}
		return
	}
	t.Error("no round granted anything")
}

// TestCommitToxic cuts connections at COMMIT: before it, nothing may be there; after it, the row must be.
func TestCommitToxic(t *testing.T) {
	root, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	s, err := startServer(t.Context(), root, "chaos-test")
	defer func() {
		if err := s.stop(); err != nil {
			t.Error(err)
		}
	}()
	if err != nil {
		t.Fatal(err)
	}
	exec := func(query string) {
		t.Helper()
		if _, err := s.admin.ExecContext(t.Context(), query); err != nil {
			t.Fatal(err)
		}
	}
	exec("CREATE DATABASE toxic")
	exec("CREATE TABLE toxic.t (after_commit BOOLEAN)")
	for _, after := range []bool{false, true} {
		proxy, err := newProxies().open("toxic", s.config.Addr)
		if err != nil {
			t.Fatal(err)
		}
		defer proxy.Stop()
		if err := proxy.poison("toxic", "commit", "upstream", map[string]any{"after": after}); err != nil {
			t.Fatal(err)
		}
		config := s.config.Clone()
		config.Addr = proxy.Listen
		db, err := openPool(config)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = db.Close() }()
		insert := func() error { return insertIn(t.Context(), db, after) }
		if err := insert(); err == nil {
			t.Errorf("after %t: COMMIT was answered", after)
		}
		want := 0
		if after {
			want = 1
		}
		if err := s.quiet(t.Context()); err != nil {
			t.Fatalf("after %t: %v", after, err)
		}
		var rows int
		if err := s.admin.QueryRow("SELECT COUNT(*) FROM toxic.t WHERE after_commit = ?", after).Scan(&rows); err != nil {
			t.Fatal(err)
		}
		if rows != want {
			t.Errorf("after %t: %d rows, want %d", after, rows, want)
		}
		proxy.heal("toxic")
		if err := insert(); err != nil {
			t.Errorf("after %t, healed: %v", after, err)
		}
	}
}

func insertIn(ctx context.Context, db *sql.DB, after bool) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, "INSERT INTO toxic.t VALUES (?)", after); err != nil {
		return errors.Join(err, tx.Rollback())
	}
	return tx.Commit()
}
