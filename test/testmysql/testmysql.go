// Package testmysql gives tests a database of their own on a real MySQL with durability on.
package testmysql

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/google/uuid"

	"flashsale.dev/operator/reserver/inventory"
)

// Script is the path of hack/mysql/mysql.sh.
func Script() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "..", "..", "hack", "mysql", "mysql.sh")
}

// serverDSN is the server's DSN: FLASHSALE_MYSQL_DSN, or a server that hack/mysql starts and leaves running.
var serverDSN = sync.OnceValues(func() (string, error) {
	if dsn := os.Getenv("FLASHSALE_MYSQL_DSN"); dsn != "" {
		return dsn, nil
	}
	cmd := exec.Command(Script(), "up")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	return strings.TrimSpace(string(out)), err
})

// Private starts a server for the test alone, with more options, and gives its DSN.
func Private(t testing.TB, name string, options ...string) string {
	t.Helper()
	script := func(command string) string {
		cmd := exec.Command(Script(), command)
		for _, v := range os.Environ() {
			if !strings.HasPrefix(v, "FLASHSALE_MYSQL_DSN=") {
				cmd.Env = append(cmd.Env, v)
			}
		}
		cmd.Env = append(cmd.Env, "FLASHSALE_MYSQL_NAME=test-"+name, "FLASHSALE_MYSQL_ARGS=--innodb-buffer-pool-size=64M "+strings.Join(options, " "))
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%s %s: %v", Script(), command, err)
		}
		return strings.TrimSpace(string(out))
	}
	t.Cleanup(func() { script("down") })
	return script("up")
}

// Config gives the connection parameters of the server.
func Config(t testing.TB) *mysql.Config {
	t.Helper()
	dsn, err := serverDSN()
	if err != nil {
		t.Fatalf("no MySQL: %v", err)
	}
	cfg, err := mysql.ParseDSN(dsn)
	if err != nil {
		t.Fatalf("reading the server's DSN: %v", err)
	}
	return cfg
}

// MariaDB says whether the server is one.
func MariaDB(t testing.TB) bool {
	t.Helper()
	var version string
	if err := Admin(t).QueryRowContext(context.Background(), "SELECT VERSION()").Scan(&version); err != nil {
		t.Fatal(err)
	}
	return strings.Contains(version, "MariaDB")
}

// Running gives the connection of the test's database that runs a statement beginning so, or 0.
func Running(t testing.TB, store *inventory.Store, statement string) (connection int64) {
	t.Helper()
	var database string
	if err := store.DB().QueryRowContext(context.Background(), "SELECT DATABASE()").Scan(&database); err != nil {
		t.Fatal(err)
	}
	rows, err := store.DB().QueryContext(context.Background(), "SHOW FULL PROCESSLIST")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	columns, err := rows.Columns() // MariaDB has one more
	if err != nil {
		t.Fatal(err)
	}
	for rows.Next() {
		var id int64
		var db, info sql.NullString
		into := make([]any, len(columns))
		for i := range into {
			into[i] = new(sql.RawBytes)
		}
		into[0], into[3], into[7] = &id, &db, &info
		if err := rows.Scan(into...); err != nil {
			t.Fatal(err)
		}
		if db.String == database && strings.HasPrefix(info.String, statement) {
			connection = id
		}
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return connection
}

// Admin connects to the server without a database.
func Admin(t testing.TB) *sql.DB {
	t.Helper()
	cfg := Config(t)
	cfg.DBName = ""
	db, err := sql.Open("mysql", cfg.FormatDSN())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// DSN creates an empty database for the test, dropped at its end, and gives its DSN.
func DSN(t testing.TB) string {
	t.Helper()
	name := fmt.Sprintf("test_%d_%s", time.Now().Unix(), strings.ReplaceAll(uuid.NewString()[:13], "-", ""))
	admin := Admin(t)
	if _, err := admin.ExecContext(context.Background(), "CREATE DATABASE "+name); err != nil {
		t.Fatalf("creating a database: %v", err)
	}
	t.Cleanup(func() {
		if _, err := admin.ExecContext(context.Background(), "DROP DATABASE "+name); err != nil {
			t.Errorf("dropping the test's database: %v", err)
		}
	})
	cfg := Config(t)
	cfg.DBName = name
	return cfg.FormatDSN()
}

// Open opens a store on a DSN and closes it at the end of the test.
func Open(t testing.TB, dsn string) *inventory.Store {
	t.Helper()
	store, err := inventory.Open(inventory.Options{DSN: dsn, MaxConns: 16})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	return store
}

// Store gives a store with its tables in a database of its own.
func Store(t testing.TB) *inventory.Store {
	t.Helper()
	store := Open(t, DSN(t))
	if _, err := store.Setup(context.Background()); err != nil {
		t.Fatalf("setting the store up: %v", err)
	}
	return store
}

// SaleBuilder builds a sale for a test.
type SaleBuilder struct{ sale inventory.Sale }

// Sale begins a sale that opened a minute ago, has one unit a buyer and a hold of 10 minutes.
func Sale(units int64) *SaleBuilder {
	return &SaleBuilder{inventory.Sale{ID: uuid.New(), Name: "test/sale", SKU: "sku", Units: units, MaxPerBuyer: 1,
		StartsAt: time.Now().Add(-time.Minute), HoldTTL: 10 * time.Minute, Generation: 1}}
}

// TTL sets how long a hold lasts.
func (b *SaleBuilder) TTL(d time.Duration) *SaleBuilder { b.sale.HoldTTL = d; return b }

// MaxPerBuyer sets the limit.
func (b *SaleBuilder) MaxPerBuyer(n int) *SaleBuilder { b.sale.MaxPerBuyer = n; return b }

// RefuseLate makes payments for lapsed holds due to be refunded.
func (b *SaleBuilder) RefuseLate() *SaleBuilder { b.sale.RefuseLate = true; return b }

// Window sets start and end, relative to now; an end of zero means none.
func (b *SaleBuilder) Window(start, end time.Duration) *SaleBuilder {
	b.sale.StartsAt = time.Now().Add(start)
	if end != 0 {
		b.sale.EndsAt = time.Now().Add(end)
	}
	return b
}

// Obj gives the sale without storing it.
func (b *SaleBuilder) Obj() inventory.Sale { return b.sale }

// In registers and loads the sale, and audits it at the end of the test.
func (b *SaleBuilder) In(t testing.TB, store *inventory.Store) inventory.Sale {
	t.Helper()
	ctx := context.Background()
	if err := store.Register(ctx, b.sale); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Load(ctx, b.sale.ID, nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { Audit(t, store, b.sale.ID) })
	return b.sale
}

// Confirm pays for one reservation.
func Confirm(store *inventory.Store, sale, reservation uuid.UUID, payment string) (*inventory.Reservation, error) {
	answers, err := store.Confirm(context.Background(), sale, "test", []inventory.Payment{{Reservation: reservation, ID: payment}})
	if err != nil {
		return nil, err
	}
	return answers[0].Reservation, answers[0].Err
}

// Release gives one reservation back.
func Release(store *inventory.Store, sale, reservation uuid.UUID) (*inventory.Reservation, error) {
	answers, err := store.Release(context.Background(), sale, "test", []uuid.UUID{reservation})
	if err != nil {
		return nil, err
	}
	return answers[0].Reservation, answers[0].Err
}

// Audit fails the test for every invariant that the rows break, and gives the report.
func Audit(t testing.TB, store *inventory.Store, sale uuid.UUID) *inventory.Report {
	t.Helper()
	report, err := store.Audit(context.Background(), sale)
	if err != nil {
		t.Fatalf("auditing: %v", err)
	}
	for _, c := range report.Failed() {
		t.Errorf("audit: %s broken, %s: %s", c.ID, c.Claim, strings.Join(c.Breaches, "; "))
	}
	return report
}

// Eventually waits until done says so, up to a minute; what names the condition.
func Eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for !done() {
		if time.Now().After(deadline) {
			t.Fatalf("a minute passed and still not: %s", what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}
