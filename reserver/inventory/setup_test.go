package inventory_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/test/testmysql"
)

// What is wrong with a database is said in a word for conditions and a sentence for people, and nothing is changed.
func TestSetupErrors(t *testing.T) {
	good := testmysql.DSN(t)
	admin := testmysql.Admin(t)
	dsn := func(change func(user, password, addr, db *string)) string {
		cfg := testmysql.Config(t)
		change(&cfg.User, &cfg.Passwd, &cfg.Addr, &cfg.DBName)
		return cfg.FormatDSN()
	}
	readOnly := "ro_" + fmt.Sprint(time.Now().UnixNano()%1e9)
	for _, q := range []string{"CREATE USER " + readOnly + " IDENTIFIED BY 'right'", "GRANT SELECT ON *.* TO " + readOnly} {
		if _, err := admin.ExecContext(ctx, q); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { _, _ = admin.ExecContext(ctx, "DROP USER "+readOnly) })
	myISAM := testmysql.Open(t, good)
	if _, err := myISAM.DB().ExecContext(ctx, "CREATE TABLE flashsale_unit (sale_id BINARY(16), unit_no INT, state INT) ENGINE=MyISAM"); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, dsn, want string }{
		{"not a DSN", "mysql://root@host/db", inventory.ReasonInvalidDSN},
		{"no database", dsn(func(_, _, _, db *string) { *db = "" }), inventory.ReasonInvalidDSN},
		{"nobody listens", dsn(func(_, _, addr, _ *string) { *addr = "127.0.0.1:1" }), inventory.ReasonUnreachable},
		{"wrong password", dsn(func(user, password, _, _ *string) { *user, *password = readOnly, "wrong" }), inventory.ReasonAccessDenied},
		{"unknown database", dsn(func(_, _, _, db *string) { *db = "no_such_db" }), inventory.ReasonUnknownDatabase},
		{"no permission to create tables", dsn(func(user, password, _, _ *string) { *user, *password = readOnly, "right" }), inventory.ReasonPermissionDenied},
		{"tables without row locks", good, inventory.ReasonUnsupportedEngine},
	} {
		t.Run(tt.name, func(t *testing.T) {
			short, cancel := context.WithTimeout(ctx, 20*time.Second)
			defer cancel()
			store, err := inventory.Open(inventory.Options{DSN: tt.dsn})
			if err == nil {
				defer func() { _ = store.Close() }()
				_, err = store.Setup(short)
			}
			var setup *inventory.SetupError
			if !errors.As(err, &setup) || setup.Reason != tt.want {
				t.Errorf("error %v, want reason %s", err, tt.want)
			}
		})
	}
}

// setUp gives the error of setting a store up on a DSN, and its warning.
func setUp(t *testing.T, dsn string) (store *inventory.Store, warning *inventory.SetupError, reason string) {
	t.Helper()
	store = testmysql.Open(t, dsn)
	short, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	warning, err := store.Setup(short)
	var setup *inventory.SetupError
	if err != nil && !errors.As(err, &setup) {
		t.Fatalf("not an error that says what to do: %v", err)
	}
	if setup != nil {
		reason = setup.Reason
	}
	return store, warning, reason
}

func TestASchemaOfANewerVersionIsLeftAlone(t *testing.T) {
	dsn := testmysql.DSN(t)
	store, _, reason := setUp(t, dsn)
	if reason != "" {
		t.Fatal(reason)
	}
	if _, err := store.DB().ExecContext(ctx, "INSERT INTO flashsale_schema VALUES (999, UTC_TIMESTAMP(6))"); err != nil {
		t.Fatal(err)
	}
	if _, _, reason := setUp(t, dsn); reason != inventory.ReasonNewerSchema {
		t.Errorf("reason %q", reason)
	}
}

// Tables of version 1 get what they lack, also when the migration was killed half-way before, or is run by several.
func TestMigrationOfVersion1(t *testing.T) {
	for _, lacking := range [][]string{{"removed", "release_at_end", "opened_at"}, {"release_at_end", "opened_at"}, {"opened_at"}, {}} {
		dsn := testmysql.DSN(t)
		store, _, reason := setUp(t, dsn)
		if reason != "" {
			t.Fatal(reason)
		}
		sale := testmysql.Sale(10).In(t, store)
		held := claimOne(t, store, sale, "a", 1).Reservation
		queries := []string{"DELETE FROM flashsale_schema", "INSERT INTO flashsale_schema VALUES (1, UTC_TIMESTAMP(6))"}
		for _, column := range lacking {
			queries = append(queries, "ALTER TABLE flashsale_sale DROP COLUMN "+column)
		}
		for _, q := range queries {
			if _, err := store.DB().ExecContext(ctx, q); err != nil {
				t.Fatal(err)
			}
		}
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				if _, err := testmysql.Open(t, dsn).Setup(ctx); err != nil {
					t.Errorf("lacking %v: %v", lacking, err)
				}
			})
		}
		wg.Wait()
		confirmAs(t, store, sale, held, "pay", inventory.Confirmed)
		if snap := resize(t, store, &sale, 3); snap.Units != 3 || snap.Available != 2 || snap.ReleaseAtEnd {
			t.Errorf("lacking %v: %+v", lacking, snap)
		}
	}
}

// A change of a table must not queue for long behind who reads it, with the claims behind it.
func TestMigrationDoesNotWaitForLong(t *testing.T) {
	dsn := testmysql.DSN(t)
	store, _, _ := setUp(t, dsn)
	sale := testmysql.Sale(10).In(t, store)
	for _, q := range []string{"UPDATE flashsale_schema SET version = 1", "ALTER TABLE flashsale_sale DROP COLUMN release_at_end"} {
		if _, err := store.DB().ExecContext(ctx, q); err != nil {
			t.Fatal(err)
		}
	}
	audit, err := store.DB().BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = audit.Rollback() }()
	scan(t, audit, "SELECT name FROM flashsale_sale")
	began := time.Now()
	if _, _, reason := setUp(t, dsn); reason != inventory.ReasonDatabaseError || time.Since(began) > 10*time.Second {
		t.Errorf("after %v: reason %q", time.Since(began), reason)
	}
	if err := audit.Rollback(); err != nil {
		t.Fatal(err)
	}
	if _, _, reason := setUp(t, dsn); reason != "" {
		t.Errorf("reason %q", reason)
	}
	wantOutcome(t, claimOne(t, store, sale, "a", 1), inventory.OutcomeHeld)
}

// A server that takes SKIP LOCKED and locks nothing, as TiDB does: a proxy blanks the words out of the statements.
func TestAServerThatDoesNotLockIsRefused(t *testing.T) {
	cfg, err := mysql.ParseDSN(testmysql.DSN(t))
	if err != nil {
		t.Fatal(err)
	}
	words := []byte("FOR UPDATE SKIP LOCKED")
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	server := cfg.Addr
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			upstream, err := net.Dial("tcp", server)
			if err != nil {
				_ = client.Close()
				continue
			}
			go func() { _, _ = io.Copy(client, upstream); _ = client.Close() }()
			go func() {
				defer func() { _ = upstream.Close() }()
				buffer := make([]byte, 64<<10) // a statement of the probe fits
				for {
					n, err := client.Read(buffer)
					if err != nil {
						return
					}
					sent := bytes.ReplaceAll(buffer[:n], words, bytes.Repeat([]byte(" "), len(words)))
					if _, err := upstream.Write(sent); err != nil {
						return
					}
				}
			}()
		}
	}()
	cfg.Addr = listener.Addr().String()
	if _, _, reason := setUp(t, cfg.FormatDSN()); reason != inventory.ReasonUnsupportedDatabase {
		t.Errorf("reason %q", reason)
	}
}

// A server of our own is misconfigured in turn, and while a sale goes on: what is wrong has a name, and no unit is lost.
func TestAServerThatIsUnfit(t *testing.T) {
	dsn := testmysql.Private(t, "unfit", "--max-connections=40")
	store, warning, reason := setUp(t, dsn)
	if warning != nil || reason != "" {
		t.Fatalf("a good server gave %v, %s", warning, reason)
	}
	admin := func(query string) {
		t.Helper()
		if _, err := store.DB().ExecContext(ctx, query); err != nil {
			t.Fatalf("%s: %v", query, err)
		}
	}
	sale := testmysql.Sale(5).In(t, store)
	wantOutcome(t, claimOne(t, store, sale, "before", 1), inventory.OutcomeHeld)

	t.Run("durability off", func(t *testing.T) {
		admin("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
		defer admin("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
		store, warning, reason := setUp(t, dsn)
		if reason != "" || warning == nil || warning.Reason != inventory.ReasonNotDurable {
			t.Errorf("warning %v, reason %q: want it to run, warned", warning, reason)
		}
		wantOutcome(t, claimOne(t, store, sale, "undurable", 1), inventory.OutcomeHeld)
	})
	t.Run("max_connections too small", func(t *testing.T) {
		admin("SET GLOBAL max_connections = 12")
		defer admin("SET GLOBAL max_connections = 40")
		if _, _, reason := setUp(t, dsn); reason != inventory.ReasonTooManyConnections {
			t.Errorf("reason %q", reason)
		}
	})
	t.Run("no connection left", func(t *testing.T) {
		var busy []*sql.Conn
		defer func() {
			for _, c := range busy {
				_ = c.Close()
			}
		}()
		hog, err := sql.Open("mysql", dsn)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = hog.Close() }()
		for {
			c, err := hog.Conn(ctx)
			if err != nil {
				break
			}
			busy = append(busy, c)
		}
		if _, _, reason := setUp(t, dsn); reason != inventory.ReasonTooManyConnections {
			t.Errorf("reason %q", reason)
		}
	})
	t.Run("read-only", func(t *testing.T) {
		admin("CREATE USER app IDENTIFIED BY 'app'")
		admin("GRANT ALL ON flashsale.* TO app")
		admin("SET GLOBAL read_only = 1")
		defer admin("SET GLOBAL read_only = 0")
		cfg, err := mysql.ParseDSN(dsn)
		if err != nil {
			t.Fatal(err)
		}
		cfg.User, cfg.Passwd = "app", "app"
		app := cfg.FormatDSN()
		if _, _, reason := setUp(t, app); reason != inventory.ReasonReadOnly {
			t.Errorf("reason %q", reason)
		}
		_, err = testmysql.Open(t, app).Claim(ctx, sale.ID, inventory.NewLine("ro"), buyers(1, 1))
		if inventory.Classify(err) != inventory.Unavailable || inventory.AsSetupError(err).Reason != inventory.ReasonReadOnly {
			t.Errorf("a claim gave %v", err)
		}
	})
	wantOutcome(t, claimOne(t, store, sale, "after", 1), inventory.OutcomeHeld)
	wantCounts(t, store, sale, 2, 3, 0)
}

// The data file is full: what cannot be written is said, and what was promised stays.
func TestADiskThatIsFull(t *testing.T) {
	if testmysql.MariaDB(t) {
		t.Skip("MariaDB's initial data file has another size")
	}
	// All tables in one file that may not grow.
	dsn := testmysql.Private(t, "full", "--innodb-file-per-table=OFF", "--innodb-data-file-path=ibdata1:12M", "--innodb-undo-log-truncate=OFF")
	store, _, reason := setUp(t, dsn)
	if reason != "" {
		t.Fatal(reason)
	}
	first := testmysql.Sale(10).In(t, store)
	held := claimOne(t, store, first, "a", 1)
	wantOutcome(t, held, inventory.OutcomeHeld)
	big := testmysql.Sale(10_000_000).Obj()
	if err := store.Register(ctx, big); err != nil {
		t.Fatal(err)
	}
	loaded, err := store.Load(ctx, big.ID, nil)
	if err == nil || inventory.Classify(err) != inventory.Unavailable || inventory.AsSetupError(err).Reason != inventory.ReasonDiskFull {
		t.Fatalf("loading more than fits gave %d, %v", loaded, err)
	}
	testmysql.Audit(t, store, big.ID)
	r, err := store.Reservation(ctx, first.ID, held.Reservation.ID)
	if err != nil || r.State != inventory.Held {
		t.Errorf("the hold from before is %+v, %v", r, err)
	}
	if err := store.Purge(ctx, big.ID); err != nil { // makes room
		t.Fatal(err)
	}
	testmysql.Eventually(t, "there is room again", func() bool {
		results, err := store.Claim(ctx, first.ID, inventory.NewLine("again"), []inventory.Request{{Buyer: "b", Quantity: 1}})
		return err == nil && (results[0].Outcome == inventory.OutcomeHeld || results[0].Outcome == inventory.OutcomeReplay)
	})
}
