package e2e

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	_ "github.com/go-sql-driver/mysql"
)

// The probe is this test program again, run in the node's network: there it can reach pods, Services and the database.

// probeOrder says what to do, as JSON in the environment variable E2E_PROBE.
type probeOrder struct {
	SQL     []string      // statements to run
	DSN     string        // where
	Targets []string      // host:port that buyers claim from
	Buyers  int           // that click at each target, again and again
	Until   time.Time     // when they stop
	Pause   time.Duration // of a buyer between two clicks
}

// probeReport is what the buyers of one target saw.
type probeReport struct {
	Target     string
	FirstGrant time.Time      // earliest grantedAt, by the database's clock
	LastGrant  time.Time      // latest
	Answers    map[string]int // by status and problem type
	Errors     []string       // of requests without an answer
}

// probe runs the probe in the node's network and gives the reports.
func probe(t *testing.T, order probeOrder) []probeReport {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(order)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(node, "exec", self)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "E2E_PROBE="+string(text))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Errorf("probe: %v: %s", err, stderr.String())
		return nil
	}
	var reports []probeReport
	if err := json.Unmarshal(out, &reports); err != nil {
		t.Errorf("the probe printed %q: %v", out, err)
	}
	return reports
}

// beProbe does what the order says and prints the reports.
func beProbe(text string) error {
	var order probeOrder
	if err := json.Unmarshal([]byte(text), &order); err != nil {
		return err
	}
	if len(order.SQL) > 0 {
		db, err := sql.Open("mysql", order.DSN)
		if err != nil {
			return err
		}
		defer func() { _ = db.Close() }()
		for _, statement := range order.SQL {
			if _, err := db.Exec(statement); err != nil {
				return fmt.Errorf("%s: %w", statement, err)
			}
		}
	}
	reports := make([]probeReport, len(order.Targets))
	var wg sync.WaitGroup
	for i, target := range order.Targets {
		reports[i] = probeReport{Target: target, Answers: map[string]int{}}
		var mu sync.Mutex
		// Connections are kept, as a gateway keeps them.
		httpClient := &http.Client{Timeout: 15 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: order.Buyers, DialContext: (&net.Dialer{Timeout: 5 * time.Second}).DialContext}}
		for n := range order.Buyers {
			wg.Go(func() {
				for click := 0; time.Now().Before(order.Until); click++ {
					buyer := fmt.Sprintf("%s-%d-%d", target, n, click)
					answer, granted, err := clickOnce(httpClient, target, buyer)
					mu.Lock()
					r := &reports[i]
					if err != nil {
						r.Errors = append(r.Errors, err.Error())
					} else {
						r.Answers[answer]++
					}
					if !granted.IsZero() && (r.FirstGrant.IsZero() || granted.Before(r.FirstGrant)) {
						r.FirstGrant = granted
					}
					if granted.After(r.LastGrant) {
						r.LastGrant = granted
					}
					mu.Unlock()
					time.Sleep(order.Pause)
				}
			})
		}
	}
	wg.Wait()
	return json.NewEncoder(os.Stdout).Encode(reports)
}

// clickOnce asks for one unit. It gives the status and, of a refusal, the problem's type.
func clickOnce(c *http.Client, target, buyer string) (answer string, granted time.Time, err error) {
	request, err := http.NewRequestWithContext(context.Background(), http.MethodPost, "http://"+target+"/v1/reservations", strings.NewReader(`{"quantity":1}`))
	if err != nil {
		return "", granted, err
	}
	request.Header.Set("X-Buyer-Id", buyer)
	response, err := c.Do(request)
	if err != nil {
		return "", granted, err
	}
	defer func() { _ = response.Body.Close() }()
	var body struct {
		Type      string
		GrantedAt time.Time
	}
	if err := json.NewDecoder(response.Body).Decode(&body); err != nil {
		return "", granted, err
	}
	return strings.TrimSpace(fmt.Sprintf("%d %s", response.StatusCode, body.Type[strings.LastIndex(body.Type, "/")+1:])), body.GrantedAt, nil
}
