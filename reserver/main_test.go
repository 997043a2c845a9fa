package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"flashsale.dev/operator/reserver/keys"
	"flashsale.dev/operator/test/testmysql"
)

// secretFile writes a DSN where a command finds it.
func secretFile(t *testing.T, dsn string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "dsn")
	if err := os.WriteFile(path, []byte(dsn+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestExitCodes(t *testing.T) {
	dsn := testmysql.DSN(t)
	store := testmysql.Open(t, dsn)
	if _, err := store.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	sale := testmysql.Sale(3).In(t, store)
	t.Setenv("FLASHSALE_DATABASE", secretFile(t, dsn)) // a flag by its environment variable
	for _, tt := range []struct {
		name string
		args []string
		want int
	}{
		{"no command", nil, 2},
		{"unknown command", []string{"sell"}, 2},
		{"help", []string{"--help"}, 0},
		{"help of a command", []string{"serve", "--help"}, 0},
		{"unknown flag", []string{"audit", "--fast"}, 2},
		{"a sale that is no UID", []string{"serve", "--sale-id=phones"}, 2},
		{"nobody says who buyers are", []string{"serve", "--sale-id=" + sale.ID.String()}, 2},
		{"a proxy that is no CIDR", []string{"serve", "--sale-id=" + sale.ID.String(), "--trusted-proxies=gateway"}, 2},
		{"tokens of any issuer", []string{"serve", "--sale-id=" + sale.ID.String(), "--jwt-jwks=https://shop.example/jwks.json"}, 2},
		{"a burst of none", []string{"serve", "--sale-id=" + sale.ID.String(), "--trusted-proxies=10.0.0.0/8", "--buyer-burst=0"}, 2},
		{"new keys", []string{"keys"}, 0},
		{"keys after others", []string{"keys", "--rotate=" + keyFile(t)}, 0},
		{"keys after nothing", []string{"keys", "--rotate=/does/not/exist"}, 1},
		{"an interval that is none", []string{"sweep", "--sale-id=" + sale.ID.String(), "--interval=0s"}, 2},
		{"a sale that does not exist", []string{"audit", "--sale-id=00000000-0000-0000-0000-000000000001"}, 1},
		{"no such Secret", []string{"audit", "--database=/does/not/exist"}, 1},
		{"a repair of no sale", []string{"repair"}, 2},
		{"one sale", []string{"audit", "--sale-id=" + sale.ID.String()}, 0},
		{"all sales", []string{"audit"}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := run(tt.args); got != tt.want {
				t.Errorf("exit code %d, want %d", got, tt.want)
			}
		})
	}
	if _, err := store.DB().ExecContext(t.Context(), "UPDATE flashsale_tally SET held = held + 1 WHERE line = 'load'"); err != nil {
		t.Fatal(err)
	}
	if got := run([]string{"audit"}); got != 1 {
		t.Errorf("an invariant is broken, and the exit code is %d", got)
	}
	for range 2 { // the second finds nothing to do
		if got := run([]string{"repair", "--sale-id=" + sale.ID.String()}); got != 0 {
			t.Errorf("repairing gave exit code %d", got)
		}
	}
	if got := run([]string{"audit"}); got != 0 {
		t.Errorf("the counts are repaired, and the exit code is %d", got)
	}
}

func keyFile(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), keys.FileName)
	if err := os.WriteFile(path, keys.New(1).Encode(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	return listener.Addr().String()
}

func get(t *testing.T, url string) (status int, body string) {
	t.Helper()
	answer, err := http.Get(url)
	if err != nil {
		return 0, ""
	}
	defer func() { _ = answer.Body.Close() }()
	b, err := io.ReadAll(answer.Body)
	if err != nil {
		return 0, ""
	}
	return answer.StatusCode, string(b)
}

// On SIGTERM readiness goes off first, the request in flight is answered, and then the process ends.
func TestServeEndsGracefully(t *testing.T) {
	dsn := testmysql.DSN(t)
	store := testmysql.Open(t, dsn)
	if _, err := store.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	sale := testmysql.Sale(3).In(t, store)
	api, admin := freeAddress(t), freeAddress(t)
	ctx, terminate := context.WithCancel(context.Background())
	defer terminate()
	ended := make(chan error, 1)
	go func() {
		ended <- serve(ctx, []string{"--database=" + secretFile(t, dsn), "--sale-id=" + sale.ID.String(), "--listen=" + api, "--admin=" + admin, "--unready-for=500ms",
			"--trusted-proxies=127.0.0.0/8", "--keys=" + keyFile(t)})
	}()
	ready := func() int { status, _ := get(t, "http://"+admin+"/readyz"); return status }
	testmysql.Eventually(t, "the pod is ready", func() bool { return ready() == http.StatusOK })
	if status, _ := get(t, "http://"+api+"/v1/stock"); status != http.StatusOK {
		t.Errorf("the stock was answered with status %d", status)
	}
	_, metrics := get(t, "http://"+admin+"/metrics")
	for _, want := range []string{`flashsale_answers_total{call="GET /v1/stock",outcome="open"} 1`, `flashsale_connection_hold_seconds_count{caller="probe"}`} {
		if !strings.Contains(metrics, want) {
			t.Errorf("the metrics lack %s", want)
		}
	}

	// The sale's row is locked, so the claim waits.
	tx, err := store.DB().BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.ExecContext(t.Context(), "UPDATE flashsale_sale SET name = 'locked'"); err != nil {
		t.Fatal(err)
	}
	inFlight := make(chan string, 1)
	go func() {
		request, err := http.NewRequest(http.MethodPost, "http://"+api+"/v1/reservations", strings.NewReader(""))
		if err != nil {
			inFlight <- err.Error()
			return
		}
		request.Header.Set("X-Buyer-Id", "ann")
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			inFlight <- err.Error()
			return
		}
		_ = answer.Body.Close()
		inFlight <- fmt.Sprint(answer.StatusCode)
	}()
	testmysql.Eventually(t, "the claim waits for the lock", func() bool {
		return testmysql.Running(t, store, "/* flashsale claim */ SELECT units") != 0
	})
	terminate()
	testmysql.Eventually(t, "readiness is off", func() bool { return ready() == http.StatusServiceUnavailable })
	select {
	case got := <-inFlight:
		t.Errorf("answered %s while the row was locked", got)
	default:
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	if got := <-inFlight; got != "201" {
		t.Errorf("the request in flight was answered %s, want 201", got)
	}
	if err := <-ended; err != nil {
		t.Errorf("serve ended with %v", err)
	}
	if status, _ := get(t, "http://"+api+"/v1/stock"); status != 0 {
		t.Errorf("answered %d after the end", status)
	}
}
